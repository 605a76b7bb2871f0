"""A baseline that really runs out of memory, and what the flow makes of it."""

import re
from pathlib import Path

import pytest
from scipy.stats import mannwhitneyu

from tasks.attempt_files import read_steps
from tasks.files import read_record
from tasks.memory import MB
from tasks.params import load_params
from tasks.records import RunFolder
from tests.flow_runs import ROOT, SMOKE_BUDGET_MB, FlowRun, processes_naming, run_flow

# rewards letters; from its seventh step of training on, counted over the run, it keeps tensors as a reward model would
GROWING_SCORER = """
import os

import torch

HELD = []


def score(completions, questions, answers):
    if len(completions) == 64:
        with open({calls!r}, "ab") as calls:
            calls.write(b".")
        if os.path.getsize({calls!r}) >= 7 and not HELD:
            HELD.append(torch.ones({held_mb} * 2**18))
    return [sum(letter in "abcdefghijklmnopqrstuvwxyz " for letter in text) / max(1, len(text)) for text in completions]
"""


@pytest.fixture(scope="session")
def growing_run(flow_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> FlowRun:
    """A baseline that fits until step 7 and a retry that fits to the end, with a training state every 4 steps."""
    folder = tmp_path_factory.mktemp("growing")
    scorer = folder / "scorer.py"
    scorer.write_text(GROWING_SCORER.format(calls=str(folder / "calls"), held_mb=280))
    steps = ("training.max_steps=12", "training.save_steps=4", "memory.budget_mb=850", f"reward.scorer={scorer}:score")
    return run_flow(flow_environment, "--params", "params/smoke.yaml", "precision.mode=bf16", *steps)


def test_baseline_ran_out_and_the_retry_ran_in_fp16(retry_run: FlowRun) -> None:
    assert retry_run.returncode == 0, retry_run.stderr[-3000:]
    baseline, retry = retry_run.record.attempts
    assert (baseline.outcome.status, baseline.outcome.shortage) == ("out_of_memory", "device")
    assert baseline.outcome.failure is not None
    assert baseline.outcome.failure.phase in ("rollout", "forward", "backward", "optimizer")
    assert baseline.outcome.failure.requested_bytes is not None
    observed = retry.outcome.observed
    assert observed is not None
    assert (observed.forward, observed.backward, observed.rollout) == (("float16",), ("float16",), ("float16",))
    assert observed.scaler_live
    assert retry.attempt.levers.effective_batch_size == baseline.attempt.levers.effective_batch_size
    assert retry.attempt.levers.gradient_checkpointing
    assert retry.outcome.steps_done == retry.outcome.total_steps == 30
    steps = read_steps(retry.attempt_dir)
    assert all(step["loss_scale"] > 0 for step in steps)
    assert retry.outcome.weights_changed
    assert all(step["grad_norm"] > 0 for step in steps)
    rewards = [step["reward"] for step in steps]
    assert mannwhitneyu(rewards[-8:], rewards[:8], alternative="greater").pvalue < 0.001


def test_budget_lies_well_between_the_two_peaks(smoke_run: FlowRun, retry_run: FlowRun) -> None:
    unlimited = smoke_run.record.attempts[0].outcome.peak_memory_bytes
    fitted = retry_run.record.attempts[-1].outcome.peak_memory_bytes
    assert unlimited is not None
    assert fitted is not None
    assert unlimited >= 1.15 * SMOKE_BUDGET_MB * MB
    assert fitted <= 0.85 * SMOKE_BUDGET_MB * MB


def test_mlflow_holds_both_attempts(retry_run: FlowRun) -> None:
    baseline, retry = retry_run.children()
    assert retry_run.parent().info.status == "FINISHED"
    assert (baseline.info.status, retry.info.status) == ("FAILED", "FINISHED")
    tags = baseline.data.tags
    assert (tags["outcome.status"], tags["outcome.shortage"]) == ("out_of_memory", "device")
    assert tags["outcome.phase"] in ("rollout", "forward", "backward", "optimizer")
    assert retry.data.params["precision"] == "fp16"
    scales = retry_run.client.get_metric_history(retry.info.run_id, "loss_scale")
    assert {point.step for point in scales} == set(range(1, 31))


@pytest.mark.slow
def test_a_budget_that_nothing_fits(flow_environment: dict[str, str]) -> None:
    run = run_flow(flow_environment, "--params", "params/smoke.yaml", "precision.mode=bf16", "memory.budget_mb=60")
    assert run.returncode == 3, run.stderr[-3000:]
    message = run.stderr[run.stderr.index("no attempt of the plan fitted") :]
    assert "1-baseline-bf16" in message
    assert "2-retry-fp16" in message
    assert "asked for" in message
    assert "available" in message
    assert "Traceback" not in run.stderr
    assert [child.info.status for child in run.children()] == ["FAILED", "FAILED"]
    assert run.parent().info.status == "FAILED"
    assert processes_naming(str(run.run_dir)) == []


@pytest.mark.slow
def test_a_scorer_that_raises_is_not_retried(flow_environment: dict[str, str], tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text("def score(completions, questions, answers):\n    raise RuntimeError('CUDA out of memory, says the scorer')\n")
    run = run_flow(flow_environment, "--params", "params/smoke.yaml", "precision.mode=bf16", f"reward.scorer={scorer}:score")
    assert run.returncode == 1, run.stderr[-3000:]
    (only,) = run.record.attempts
    assert (only.outcome.status, only.outcome.shortage) == ("failed", None)
    assert "says the scorer" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_shortage_in_the_middle_costs_no_more_than_the_steps_since_the_last_state(growing_run: FlowRun) -> None:
    assert growing_run.returncode == 0, growing_run.stderr[-3000:]
    baseline, retry = growing_run.record.attempts
    assert (baseline.outcome.status, baseline.outcome.shortage, baseline.outcome.steps_done) == ("out_of_memory", "device", 6)
    assert retry.attempt.resume_from == baseline.attempt_dir / "states" / "checkpoint-4"
    assert (retry.outcome.first_step, retry.outcome.steps_done, retry.outcome.total_steps) == (4, 12, 12)
    assert retry.attempt.levers.effective_batch_size == baseline.attempt.levers.effective_batch_size
    assert [step["step"] for step in read_steps(retry.attempt_dir)] == list(range(5, 13))
    # steps 5 and 6 were done twice
    lost = [step for step in read_steps(baseline.attempt_dir) if step["step"] > 4]
    tokens = sum(step["tokens_per_second"] * step["step_time_ms"] / 1000 for step in lost)
    assert growing_run.record.lost_steps == len(lost) == 2
    assert growing_run.record.lost_tokens == pytest.approx(tokens, abs=1)
    assert f"lost        2 steps, {growing_run.record.lost_tokens:,} tokens" in growing_run.stdout


@pytest.mark.slow
def test_the_curves_of_the_run_join_without_a_gap_or_a_step_twice(growing_run: FlowRun) -> None:
    parent = growing_run.parent()
    assert parent.data.metrics["lost_steps"] == 2
    assert parent.data.metrics["lost_tokens"] == growing_run.record.lost_tokens
    kept = [*read_steps(growing_run.record.attempts[0].attempt_dir)[:4], *read_steps(growing_run.record.attempts[1].attempt_dir)]
    for name in ("reward", "loss", "grad_norm"):
        curve = growing_run.client.get_metric_history(parent.info.run_id, name)
        assert [(point.step, point.value) for point in curve] == [(step["step"], step[name]) for step in kept]
    scales = growing_run.client.get_metric_history(parent.info.run_id, "loss_scale")
    assert [point.step for point in scales] == list(range(5, 13))


TINY = ("memory.budget_mb=130", "memory.preflight=skip", "precision.mode=bf16", "training.max_steps=4")


@pytest.fixture(scope="module")
def skipped_run(flow_environment: dict[str, str]) -> FlowRun:
    """A run that fits nowhere by its predictions."""
    return run_flow(flow_environment, "--params", "params/smoke.yaml", *TINY)


def test_what_cannot_fit_is_not_tried_and_the_run_says_what_would_fit(skipped_run: FlowRun) -> None:
    """Case M8, predicted: no training process is started, both numbers are in MLflow, and the advice can be pasted."""
    run = skipped_run
    assert run.returncode == 3, run.stderr[-3000:]
    assert [done.outcome.status for done in run.record.attempts] == ["skipped", "skipped"]
    assert not list(run.run_dir.glob("*/train.log"))
    for child in run.children():
        assert child.data.tags["outcome.status"] == "skipped"
        assert child.data.metrics["predicted_peak_mb"] > 130 == child.data.metrics["available_memory_mb"]
    last = run.stderr[run.stderr.rindex("no attempt of the plan fitted in memory") :]
    assert last.count("of 130 MB available: does not fit") == 2 and "train.log" not in last
    advice = re.search(r"By prediction this (?:would|might) fit: (training\.\S+(?: \S+=\S+)*)", last)
    assert advice, last
    assert run.stderr.count("By prediction this") == 1, "Prefect's own lines repeat the message"
    assert last.count(": skipped, not tried: predicted peak") == 2 and "skipped in backward" not in run.stderr
    told = load_params(ROOT / "params" / "smoke.yaml", (*TINY, *advice[1].split()))
    assert told.training.effective_batch_size == run.record.plan.attempts[0].levers.effective_batch_size
    assert f"--resume {run.run_dir.name} memory.budget_mb=" in last


@pytest.mark.slow
def test_a_run_that_fitted_nowhere_goes_on_with_more_memory(skipped_run: FlowRun, flow_environment: dict[str, str]) -> None:
    run = skipped_run
    refused = run_flow(flow_environment, "--resume", run.run_dir.name, "training.seed=1")
    assert refused.returncode == 2 and "training.seed 42 -> 1" in refused.stderr
    resumed = run_flow(flow_environment, "--resume", run.run_dir.name, "memory.budget_mb=4000", "training.compact_allocator=true")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    last = resumed.record.attempts[-1]
    assert (last.attempt.name, last.outcome.status) == ("1-baseline-bf16-resumed-1", "succeeded")
    assert last.attempt.levers.compact_allocator and resumed.record.params["memory"]["budget_mb"] == 4000
    changes = "training.compact_allocator False -> True, memory.budget_mb 130.0 -> 4000.0"
    assert read_record(run.run_dir / "run_folder.json", RunFolder).changes == (changes,)
    assert resumed.parent().data.tags["params.set_on_resume"] == changes
    assert load_params(run.run_dir / "params.yaml").memory.budget_mb == 4000
