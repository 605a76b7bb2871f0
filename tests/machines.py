"""Recorded machines: the raw facts under tests/fixtures/hardware, and what they are judged to be."""

from pathlib import Path

from tasks.files import read_record
from tasks.hardware_support import judge
from tasks.machine_facts import MachineFacts
from tasks.records import Hardware

FIXTURES = Path(__file__).parent / "fixtures" / "hardware"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.json"))
UNUSABLE = {"tesla_p100_kernels_missing"}


def facts_of(name: str) -> MachineFacts:
    """Read a recorded machine."""
    return read_record(FIXTURES / f"{name}.json", MachineFacts)


def hardware_of(name: str) -> Hardware:
    """Judge a recorded machine."""
    return judge(facts_of(name))
