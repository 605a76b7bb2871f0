"""A whole comparison: one variant that ends well, one that diverges and one that runs out of memory."""

import re
from pathlib import Path

import pytest

from tasks.attempt_files import read_steps
from tasks.comparison_measures import ComparisonRecord
from tasks.files import read_record
from tests.flow_runs import FlowRun, run_flow
from tests.flows.compared import every_figure_is_in_mlflow, runs_by_name

TINY = (
    "--params",
    "params/compare.yaml",
    "training.max_steps=4",
    "training.per_device_train_batch_size=16",
    "training.max_completion_length=16",
    "comparison.warmup_steps=1",
    "dataset.num_train=64",
    "dataset.num_eval=20",
    "memory.preflight=warn",
    # every fp16 gradient overflows under this scale
    "comparison.variants={fp32: {precision.mode: fp32}, wild: {precision.mode: fp16, precision.init_scale: 1.0e30, "
    "precision.max_consecutive_skips: 2}, short: {precision.mode: bf16, memory.budget_mb: 20}}",
    "comparison.seeds=[1]",
)


@pytest.fixture(scope="module")
def compared(flow_environment: dict[str, str]) -> FlowRun:
    return run_flow(flow_environment, *TINY, flow="compare")


def test_a_variant_that_fails_is_a_row_that_says_what_happened_and_the_rest_goes_on(compared: FlowRun) -> None:
    assert compared.returncode == 0, compared.stderr[-3000:]
    well, wild, short = compared.comparison.measured.runs
    assert (well.status, wild.status, short.status) == ("succeeded", "diverged", "out_of_memory")
    assert well.measures is not None and well.measures.measured_steps == 3
    assert "diverged" in wild.what_happened and "ran out of device memory" in short.what_happened
    # in the format that trained it, a checkpoint is not evaluated twice
    own = next(served for served in compared.comparison.measured.serving if served.precision == "fp32").accuracy
    assert own == well.measures.accuracy
    assert {path.stem for path in (compared.run_dir / "evaluation").glob("*-*.json")} >= {"fp32-seed1", "serving-bf16", "serving-fp16"}
    assert not (compared.run_dir / "evaluation" / "serving-fp32.json").exists()
    report = (compared.run_dir / "report.md").read_text()
    assert "| 2 | wild | 1 | diverged |" in report and "ran out of device memory" in report
    assert "Traceback" not in compared.stderr
    assert re.search(r"times; the training processes took \d+ s", compared.stdout)


def test_few_steps_are_indicative_and_give_no_verdict(compared: FlowRun) -> None:
    verdict = compared.comparison.measured.verdict
    assert verdict.indicative and verdict.best_overall is None and verdict.findings == ()
    assert "Indicative only, and no verdict" in compared.stdout


def test_every_figure_of_the_report_is_in_mlflow(compared: FlowRun) -> None:
    every_figure_is_in_mlflow(compared)
    assert "no verdict" in compared.client.get_run(compared.comparison.tracked.run_id).data.tags["mlflow.note.content"]


def test_every_step_is_in_mlflow_under_the_same_keys(compared: FlowRun) -> None:
    its = runs_by_name(compared)
    assert set(its) == {"fp32-seed1", "wild-seed1", "short-seed1"}
    (done, *_) = compared.comparison.attempts
    for step in read_steps(done.attempt_dir):
        for name in ("reward", "entropy", "grad_norm", "loss", "step_time_ms"):
            points = compared.client.get_metric_history(its["fp32-seed1"].info.run_id, name)
            assert step[name] in {point.value for point in points if point.step == step["step"]}, name
    assert {frozenset(child.data.params) for child in its.values()} == {frozenset(its["fp32-seed1"].data.params)}


def test_checkpoints_are_not_kept_and_the_record_is(compared: FlowRun) -> None:
    assert not list(compared.run_dir.rglob("*.safetensors"))
    assert (compared.run_dir / "report.html").is_file()
    assert Path(compared.run_dir / "summary.txt").read_text() in compared.stdout


@pytest.mark.slow
def test_a_comparison_is_gone_on_with_by_its_own_flow_only(compared: FlowRun, flow_environment: dict[str, str]) -> None:
    name = compared.run_dir.name
    other = run_flow(flow_environment, "--resume", name)
    assert other.returncode == 2 and f"go on with python -m flows.compare --resume {name}" in other.stderr
    (compared.run_dir / "comparison.json").rename(compared.run_dir / "aside.json")
    try:
        # as if it had been stopped before its end: nothing is trained or evaluated again
        again = run_flow(flow_environment, "--resume", name, flow="compare")
        assert again.returncode == 0, again.stderr[-3000:]
        assert "answered" not in again.stderr
        assert again.comparison.measured == read_record(compared.run_dir / "aside.json", ComparisonRecord).measured
        assert again.comparison.wall_seconds is None
    finally:
        (compared.run_dir / "aside.json").unlink(missing_ok=True)
