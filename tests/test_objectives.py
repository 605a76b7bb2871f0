"""Which precision comes first under each objective, and why."""

import re

import pytest

from tasks.objectives import AIMS, first_precision
from tasks.places import PROJECT_DIR
from tasks.records import FormatSupport, Hardware, Support
from tests.machines import hardware_of


def cpu_with_fp16_alone() -> Hardware:
    bf16, fp16 = FormatSupport(level=Support.none, fact="no CPU flag bf16"), FormatSupport(level=Support.native, fact="CPU flag asimdhp")
    return hardware_of("cpu_epyc_9r14").model_copy(update={"device_name": "Neoverse-N1", "bf16": bf16, "fp16": fp16})


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("a800_half_full", ("bf16", "fp16", "bf16", "bf16")),
        ("cpu_xeon_6972p", ("bf16", "fp16", "bf16", "bf16")),
        ("tesla_t4", ("fp16", "fp16", "fp16", "fp16")),
        ("cpu_epyc_9r14", ("bf16", "bf16", "bf16", "bf16")),
        ("cpu_xeon_6252n_container", ("fp32", "fp32", "fp32", "fp32")),
        ("cpu_with_fp16_alone", ("fp32", "fp16", "fp16", "fp16")),
    ],
)
def test_the_objective_decides_where_the_hardware_leaves_a_choice(name: str, labels: tuple[str, ...]) -> None:
    machine = cpu_with_fp16_alone() if name == "cpu_with_fp16_alone" else hardware_of(name)
    for objective, label in zip(AIMS, labels, strict=True):
        chosen, reason = first_precision(machine, objective)
        assert chosen == label, objective
        assert f"objective {objective!r} ({AIMS[objective]})" in reason


def test_consistency_without_native_fp16_says_that_the_order_of_stability_holds() -> None:
    _, reason = first_precision(hardware_of("cpu_epyc_9r14"), "consistency")
    assert re.search(r"only emulates fp16 \(.*\), so the order of 'stability' holds; bf16 is native", reason)


def test_the_documentation_has_a_row_for_every_objective() -> None:
    text = (PROJECT_DIR / "docs" / "how-it-decides.md").read_text()
    assert all(f"| `{objective}` |" in text for objective in AIMS)
