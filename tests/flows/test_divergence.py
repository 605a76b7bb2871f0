"""A run that diverges stops with exit code 4 and nothing to promote, or goes on in a wider precision if it was told to."""

import pytest

from tests.flow_runs import FlowRun, run_flow

# every fp16 gradient overflows under this scale, and three halvings change nothing
DIVERGING = (
    "--params",
    "params/smoke.yaml",
    "precision.mode=fp16",
    "precision.init_scale=1.0e30",
    "precision.max_consecutive_skips=3",
    "training.save_steps=2",
)


@pytest.fixture(scope="module")
def stopped(flow_environment: dict[str, str]) -> FlowRun:
    return run_flow(flow_environment, *DIVERGING)


@pytest.fixture(scope="module")
def went_on(flow_environment: dict[str, str]) -> FlowRun:
    return run_flow(flow_environment, *DIVERGING, "precision.on_divergence=next", "training.max_steps=8")


def test_divergence_is_exit_code_4_and_no_checkpoint(stopped: FlowRun) -> None:
    assert stopped.returncode == 4, stopped.stderr[-3000:]
    assert "diverged in fp16" in stopped.stderr and "precision.on_divergence=next" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    (attempt,) = stopped.record.attempts
    assert (stopped.record.status, attempt.outcome.status, attempt.outcome.skipped_steps) == ("diverged", "diverged", 3)
    assert stopped.record.checkpoint is None and stopped.record.evaluation is None
    parent = stopped.parent()
    assert parent.info.status == "FAILED"
    assert not any("checkpoint" in tag for tag in parent.data.tags)
    (child,) = stopped.children()
    assert "backward of" in child.data.tags["warning.fp16_overflow"]
    assert "warning, step 1, skipped_steps" in stopped.stderr


def test_the_next_precision_does_every_step(went_on: FlowRun) -> None:
    assert went_on.returncode == 0, went_on.stderr[-3000:]
    first, second = went_on.record.attempts
    assert [item.attempt.name for item in (first, second)] == ["1-baseline-fp16", "3-fallback-bf16"]
    # its three steps were skipped, one of them where a state was due: no step counts as done
    assert first.outcome.last_state_dir is None
    assert (second.outcome.status, second.outcome.first_step, second.outcome.steps_done) == ("succeeded", 0, 8)
    assert second.outcome.observed is not None and second.outcome.observed.forward == ("bfloat16",)
    assert second.outcome.final_loss_scale is None
    assert went_on.record.checkpoint is not None
    assert "Starts anew: no training state was saved" in second.attempt.reason
