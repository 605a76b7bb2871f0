"""Differences that were planted, end to end: a variant that skips most of its steps, one that ruins the model, and none that is left."""

import pytest

from tests.flow_runs import FlowRun, run_flow
from tests.flows.compared import every_figure_is_in_mlflow

pytestmark = pytest.mark.slow

WORK = (
    "--params",
    "params/compare.yaml",
    "training.per_device_train_batch_size=16",
    "training.max_completion_length=16",
    "comparison.warmup_steps=1",
    "dataset.num_train=512",
    "dataset.num_eval=60",
)


@pytest.fixture(scope="module")
def planted(flow_environment: dict[str, str]) -> FlowRun:
    # the scale is halved at every overflow: from 1e30 to 1e5 it takes 83 steps
    variants = (
        "comparison.variants={usual: {precision.mode: fp32}, "
        "skipping: {precision.mode: fp16, precision.init_scale: 1.0e30, precision.max_consecutive_skips: 101}, "
        "ruinous: {precision.mode: fp32, training.learning_rate: 3.0}}"
    )
    return run_flow(flow_environment, *WORK, "training.max_steps=101", "comparison.seeds=[1, 2, 3]", variants, flow="compare")


def test_the_variant_without_a_plant_is_best_and_the_others_are_named_for_what_they_do(planted: FlowRun) -> None:
    assert planted.returncode == 0, planted.stderr[-3000:]
    record = planted.comparison
    verdict = record.measured.verdict
    assert verdict.best_overall == "usual", verdict
    shown = {(one.measure, one.better, one.worse) for found in verdict.findings for one in found.contrasts if one.shown}
    assert {run.status for run in record.measured.runs} == {"succeeded"}
    assert {("reward", "usual", "ruinous"), ("lost_steps", "usual", "skipping")} <= shown
    skipping = [run.measures for run in record.measured.runs if run.variant == "skipping" and run.measures]
    assert len(skipping) == 3 and all(measures.skipped_steps > 60 for measures in skipping)


def test_every_figure_of_a_verdict_is_in_mlflow(planted: FlowRun) -> None:
    assert any(finding.contrasts for finding in planted.comparison.measured.verdict.findings)
    every_figure_is_in_mlflow(planted)


def test_a_retrain_run_takes_over_what_was_found_and_says_so(planted: FlowRun, flow_environment: dict[str, str]) -> None:
    run = run_flow(flow_environment, *WORK, "training.max_steps=3", "precision.mode=measured")
    assert run.returncode == 0, run.stderr[-3000:]
    attempt = run.record.attempts[0].attempt
    assert attempt.precision.label == "fp32"
    assert f"precision.mode is 'measured': in comparison {planted.comparison.run_name} usual is best overall" in attempt.reason
    assert "is best overall" in run.parent().data.tags["plan.reason"]
    other = run_flow(flow_environment, *WORK, "training.max_steps=3", "precision.mode=measured", "training.learning_rate=2.0e-3")
    assert other.returncode == 2 and "differs in training.learning_rate (0.001, asked 0.002)" in other.stderr


def test_of_two_variants_that_are_the_same_none_is_best(flow_environment: dict[str, str]) -> None:
    same = "comparison.variants={one: {precision.mode: fp32}, other: {precision.mode: fp32}}"
    run = run_flow(flow_environment, *WORK, "training.max_steps=101", "comparison.seeds=[1, 2]", same, flow="compare")
    assert run.returncode == 0, run.stderr[-3000:]
    verdict = run.comparison.measured.verdict
    assert (verdict.indicative, verdict.best_overall, verdict.only_finished) == (False, None, None)
    assert [finding.best for finding in verdict.findings] == [None] * 4
    one, other = (
        [(its.correct, its.measures.reward) for its in run.comparison.measured.runs if its.measures and its.variant == name]
        for name in ("one", "other")
    )
    assert one == other


def test_a_comparison_of_which_no_run_succeeds_has_a_report_and_fails(flow_environment: dict[str, str]) -> None:
    short = ("memory.budget_mb=20", "memory.preflight=warn", "training.max_steps=3", "comparison.seeds=[1]")
    run = run_flow(
        flow_environment, *WORK, *short, "comparison.variants={a: {precision.mode: fp32}, b: {precision.mode: bf16}}", flow="compare"
    )
    assert run.returncode not in (0, 2)
    assert "no run of the comparison succeeded" in run.stderr and "Traceback" not in run.stderr
    report = (run.run_dir / "report.md").read_text()
    assert report.count("ran out of device memory") >= 2 and "No verdict: none of a and b finished every run." in report
