"""Show what is decided on every recorded machine, beside what two common rules would do there.

Launch: ``python -m tests.bench.decisions [--markdown FILE]`` (``make decisions``)

The article's rule: ``torch.cuda.get_device_capability()[0] >= 8`` means bf16, otherwise fp16.
torch's helper: bf16 where torch 2.13 says `is_bf16_supported()`, otherwise fp16; where there is no CUDA or ROCm build it is
what transformers' `is_torch_bf16_gpu_available()` asks instead (XPU and MPS: always true, NPU: by chip).
A difference is a precision other than our baseline's; "fails" is an exception at the call.
"""

import argparse
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tasks.errors import RefusedInput
from tasks.format_support import ASCEND_WITH_BF16
from tasks.hardware_support import judge
from tasks.machine_facts import MachineFacts
from tasks.params import Params
from tasks.precision import plan_precision
from tasks.records import Hardware, Support
from tests.machines import NAMES, facts_of

HEADER = ("machine", "plan", "because", "article's rule", "torch's helper")
BECAUSE_WIDTH = 66


class Row(NamedTuple):
    """One machine: the labels of our plan, why, and each rule's choice with the kind of its difference."""

    machine: str
    plan: str
    because: str
    article: str
    article_kind: str | None
    helper: str
    helper_kind: str | None


def main(arguments: list[str]) -> int:
    """Print the table and the counts; write the table as markdown where asked."""
    parser = argparse.ArgumentParser(description="what is decided on every recorded machine, beside two common rules")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table as markdown")
    options = parser.parse_args(arguments)
    rows = [decide(name, facts_of(name)) for name in NAMES]
    sys.stdout.write(terminal_table(rows) + "\n\n" + counts(rows) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown_table(rows) + "\n\n" + counts(rows) + "\n", encoding="utf-8")
    return 0


def decide(name: str, facts: MachineFacts) -> Row:
    """Plan for one machine and compare."""
    article, helper = articles_choice(facts), helpers_choice(facts)
    try:
        hardware = judge(facts)
        plan = plan_precision(hardware, Params())
    except RefusedInput as refusal:
        return Row(name, "refused", str(refusal), article, "crash", helper, "crash")
    labels = [attempt.precision.label for attempt in plan.attempts if attempt.label != "fallback"]
    kinds = [kind_of_difference(choice, labels[0], hardware) for choice in (article, helper)]
    return Row(name, ", ".join(labels), deciding_fact(labels[0], hardware), article, kinds[0], helper, kinds[1])


def articles_choice(facts: MachineFacts) -> str:
    """Return bf16, fp16 or fails; ROCm reports gfx90a as capability 9.0 and gfx1030 as 10.3."""
    if not facts.devices or facts.devices[0].api != "cuda":
        return "fails"
    capability = facts.devices[0].capability or ""
    major = int(capability[3:-2]) if facts.hip_version else int(capability.split(".")[0])
    return "bf16" if major >= 8 else "fp16"


def helpers_choice(facts: MachineFacts) -> str:
    """Return bf16 or fp16."""
    if facts.hip_version:
        return "bf16"
    first = facts.devices[0] if facts.devices else None
    claims = first is not None and (first.api != "npu" or ASCEND_WITH_BF16.match(first.name) is not None)
    return "bf16" if claims else "fp16"


def kind_of_difference(choice: str, planned: str, hardware: Hardware) -> str | None:
    """Name what a choice costs here, None where it is our own."""
    if choice == "fails":
        return "no CUDA device"
    if choice == planned:
        return None
    if choice == "bf16":
        return "slow emulation" if hardware.bf16.level is Support.emulated else "crash"
    if hardware.device_type == "cpu":
        return "silently fp32"
    return "needless fp16" if hardware.fp16.level is Support.native else "slow emulation"


def deciding_fact(planned: str, hardware: Hardware) -> str:
    """Return why the baseline is what it is."""
    if planned == "fp32":
        return f"{hardware.fp16.fact}; {hardware.bf16.fact}"
    return hardware.bf16.fact


def cells(row: Row) -> tuple[str, ...]:
    """Return the texts of one row, a difference marked."""
    marked = [
        f"{choice}  ! {kind}" if kind else choice for choice, kind in ((row.article, row.article_kind), (row.helper, row.helper_kind))
    ]
    return (row.machine, row.plan, row.because, *marked)


def terminal_table(rows: list[Row]) -> str:
    """Lay the rows out in columns, long reasons cut."""
    table = [HEADER, *(cells(row) for row in rows)]
    table = [(*line[:2], textwrap.shorten(line[2], BECAUSE_WIDTH, placeholder=" ..."), *line[3:]) for line in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def markdown_table(rows: list[Row]) -> str:
    """Lay the rows out as a markdown table, reasons whole."""
    table = [HEADER, tuple("---" for _ in HEADER), *(cells(row) for row in rows)]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in table)


def counts(rows: list[Row]) -> str:
    """Count machines, differences to each rule, and their kinds."""
    lines = [f"{len(rows)} machines"]
    for rule, kinds in (("the article's rule", [row.article_kind for row in rows]), ("torch's helper", [row.helper_kind for row in rows])):
        by_kind = Counter(kind for kind in kinds if kind).most_common()
        shares = ", ".join(f"{kind} {number}" for kind, number in by_kind)
        lines.append(f"{sum(number for _, number in by_kind)} differences to {rule}: {shares}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
