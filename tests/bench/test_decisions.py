"""The table of `make decisions`: right where it differs, and no torch in its process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tasks.places import PROJECT_DIR
from tests.bench.decisions import decide, kind_of_difference, main
from tests.machines import DECISIONS, NAMES, facts_of, hardware_of


@pytest.mark.parametrize(
    ("name", "article", "helper"),
    [
        ("tesla_t4", ("fp16", None), ("bf16", "slow emulation")),
        ("gtx_1660_ti", ("fp16", "slow emulation"), ("bf16", "slow emulation")),
        ("rx_6950_xt", ("bf16", "slow emulation"), ("bf16", "slow emulation")),
        ("mi300x", ("bf16", None), ("bf16", None)),
        ("apple_m2", ("fails", "no CUDA device"), ("bf16", "slow emulation")),
        ("ascend_910a", ("fails", "no CUDA device"), ("fp16", None)),
        ("cpu_xeon_8488c", ("fails", "no CUDA device"), ("fp16", "silently fp32")),
        ("rtx_5090_d_kernels_missing", ("bf16", "crash"), ("bf16", "crash")),
    ],
)
def test_each_rule_is_compared_with_what_we_plan(name: str, article: tuple[str, str | None], helper: tuple[str, str | None]) -> None:
    row = decide(name, facts_of(name))
    assert ((row.article, row.article_kind), (row.helper, row.helper_kind)) == (article, helper)


def test_other_kinds_of_difference() -> None:
    assert kind_of_difference("fp16", "bf16", hardware_of("h100_x8")) == "needless fp16"
    assert kind_of_difference("bf16", "fp16", hardware_of("ascend_910a")) == "crash"


def test_the_table_lists_every_machine_and_counts_the_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--markdown", str(tmp_path / "decisions.md")]) == 0
    terminal, markdown = capsys.readouterr().out, (tmp_path / "decisions.md").read_text()
    rows = [decide(name, facts_of(name)) for name in NAMES]
    for row in rows:
        assert row.plan == ("refused" if DECISIONS[row.machine].refused else ", ".join(DECISIONS[row.machine].plan))
        assert f"| {row.machine} | {row.plan} | {row.because} |" in markdown
        assert row.machine in terminal
    expected = f"{sum(row.helper_kind is not None for row in rows)} differences to torch's helper"
    assert f"{len(NAMES)} machines" in terminal and expected in terminal and expected in markdown


def test_it_needs_no_torch() -> None:
    code = "import sys, tests.bench.decisions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT_DIR, check=False).returncode == 0
