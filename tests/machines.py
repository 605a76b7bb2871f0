"""Recorded machines: the raw facts under tests/fixtures/hardware, what they are judged to be, and the right answers."""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, model_validator

from tasks.files import read_record
from tasks.hardware_support import judge
from tasks.machine_facts import MachineFacts
from tasks.records import DeviceType, Hardware, Record, Support

FIXTURES = Path(__file__).parent / "fixtures" / "hardware"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.json"))


class Decision(Record):
    """One row of decisions.yaml: the right answer for one machine."""

    device: DeviceType | None = None
    bf16: Support | None = None
    fp16: Support | None = None
    plan: tuple[Literal["bf16", "fp16", "fp32"], ...] = ()
    refused: str | None = Field(default=None, description="what a refusal must name, instead of the rest")
    why: str
    measured: dict[str, float] | None = None

    @model_validator(mode="after")
    def _whole(self) -> "Decision":
        if self.refused is None and (None in (self.device, self.bf16, self.fp16) or len(self.plan) != 2):
            raise ValueError("a row gives device, bf16, fp16 and the plan of baseline and retry, or `refused`")
        return self


DECISIONS = {name: Decision.model_validate(row) for name, row in yaml.safe_load((FIXTURES / "decisions.yaml").read_text()).items()}
UNUSABLE = {name for name, decision in DECISIONS.items() if decision.refused}


def facts_of(name: str) -> MachineFacts:
    """Read a recorded machine."""
    return read_record(FIXTURES / f"{name}.json", MachineFacts)


def hardware_of(name: str) -> Hardware:
    """Judge a recorded machine."""
    return judge(facts_of(name))
