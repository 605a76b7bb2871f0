"""A baseline that really runs out of memory, and what the flow makes of it."""

from pathlib import Path

from scipy.stats import mannwhitneyu

from tasks.attempt_files import read_steps
from tasks.memory import MB
from tests.flow_runs import SMOKE_BUDGET_MB, FlowRun, processes_naming, run_flow


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


def test_a_scorer_that_raises_is_not_retried(flow_environment: dict[str, str], tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text("def score(completions, questions, answers):\n    raise RuntimeError('CUDA out of memory, says the scorer')\n")
    run = run_flow(flow_environment, "--params", "params/smoke.yaml", "precision.mode=bf16", f"reward.scorer={scorer}:score")
    assert run.returncode == 1, run.stderr[-3000:]
    (only,) = run.record.attempts
    assert (only.outcome.status, only.outcome.shortage) == ("failed", None)
    assert "says the scorer" in run.stderr
    assert "Traceback" not in run.stderr
