"""The message at the end of a run in which no attempt succeeded."""

from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from tasks.errors import AttemptFailed, Diverged, HalfstepError, NothingFitted
from tasks.next_attempt import next_attempt
from tasks.params import Params
from tasks.precision import plan_precision
from tasks.records import (
    ArtifactVersion,
    Attempt,
    DatasetVersion,
    Failure,
    FinishedAttempt,
    MemoryPrediction,
    Outcome,
    RunFolder,
    RunSetting,
    SourceVersion,
)
from tasks.tracking.location import reaching
from tasks.tracking.runs import open_parent_run
from tasks.training import failure_of, train
from tests.machines import hardware_of

MB = 2**20


def attempts(on_divergence: str = "next") -> tuple[Attempt, ...]:
    return plan_precision(hardware_of("mi300x"), Params.model_validate({"precision": {"on_divergence": on_divergence}})).attempts


def ended(attempt: Attempt, status: str, message: str, **failure: object) -> FinishedAttempt:
    kind = failure.pop("shortage", None)
    cause = Failure.model_validate({"phase": "backward", "error_type": "RuntimeError", "message": message, **failure})
    seen = {"status": status, "failure": cause, "shortage": kind, "steps_done": 3, "total_steps": 9, "peak_memory_bytes": 7 * MB}
    outcome = Outcome.model_validate(seen)
    return FinishedAttempt(attempt=attempt, outcome=outcome, attempt_dir=Path("runs/r") / attempt.name)


def short(attempt: Attempt) -> FinishedAttempt:
    return ended(attempt, "out_of_memory", "no memory", requested_bytes=2 * MB, available_bytes=MB)


def test_nothing_fitted_names_each_attempt_with_bytes_and_the_remedy() -> None:
    first, retry, *_ = attempts()
    error = failure_of((short(first), short(retry)))
    assert isinstance(error, NothingFitted)
    for words in ("(2 tried)", "1-baseline-bf16", "2-retry-fp16", "peak 7 MB, asked for 2.0 MB more with 1.0 MB available", "budget_mb"):
        assert words in str(error)
    assert str(error).endswith("The log is runs/r/2-retry-fp16/train.log.")


def test_nothing_fitted_sets_the_predicted_beside_the_available_bytes() -> None:
    peak = MemoryPrediction(
        peak_bytes=90 * MB,
        least_bytes=81 * MB,
        most_bytes=135 * MB,
        phase="backward",
        categories={"weights": 90 * MB},
        phases={},
        available_bytes=85 * MB,
    )
    error = failure_of((short(attempts()[0].model_copy(update={"prediction": peak})),))
    told = "predicted peak 90 MB (81 to 135) in the backward of 85 MB available: may not fit (weights 90)"
    assert f"with 1.0 MB available; {told}" in str(error)


def test_host_memory_that_ran_out_is_said_as_such_with_how_much_there_is() -> None:
    message = "the training process ended by signal 9; the host has 2,048 MB (MemTotal)"
    error = failure_of((ended(attempts()[0], "out_of_memory", message, shortage="host"),))
    assert isinstance(error, NothingFitted) and error.exit_code == 3
    for words in ("host memory ran out (1 tried)", "ran out of host memory", "the host has 2,048 MB", "Raise the host's memory"):
        assert words in str(error)
    assert "budget_mb" not in str(error)


def test_stops_from_outside_that_do_not_end_are_named_with_what_to_do() -> None:
    first = attempts()[0]
    error = failure_of(tuple(ended(first, "cancelled", "something outside ended it by SIGTERM") for _ in range(4)))
    assert isinstance(error, AttemptFailed)
    for words in ("by SIGTERM, 4 times in a row, with no new training state", "training.save_steps", "go on with --resume r."):
        assert words in str(error)
    assert "precision" not in str(error)


def test_a_divergence_names_every_precision_it_came_in_and_what_could_still_help() -> None:
    first, retry, bf16, fp32 = attempts()
    stopped = failure_of((ended(attempts("stop")[0], "diverged", "the loss is nan"),))
    assert "diverged in bf16, and" in str(stopped) and "precision.on_divergence=next" in str(stopped)
    everywhere = failure_of((short(first), *(ended(item, "diverged", "the loss is nan") for item in (retry, bf16, fp32))))
    for words in ("diverged in fp16 and bf16 and fp32", "1-baseline-bf16", "4-fallback-fp32", "3 of 9 steps", ": the loss is nan"):
        assert words in str(everywhere)
    assert "No precision mends" in str(everywhere)
    no_room = failure_of((ended(first, "diverged", "the loss is nan"), short(fp32)))
    assert "diverged in bf16, and" in str(no_room) and "memory.retries an entry with precision fp32" in str(no_room)
    assert all(isinstance(error, Diverged) and error.exit_code == 4 for error in (stopped, everywhere, no_room))


@pytest.mark.parametrize("before", [0, 1])
def test_another_failure_says_that_it_is_not_retried(before: int) -> None:
    first, retry, *_ = attempts()
    error: HalfstepError = failure_of((*[short(first)] * before, ended(retry, "failed", "the scorer raised")))
    assert isinstance(error, AttemptFailed)
    assert "2-retry-fp16 failed in backward: RuntimeError: the scorer raised" in str(error)


def test_a_run_without_signal_asks_for_other_problems_not_for_another_precision() -> None:
    silent = ended(attempts()[0], "diverged", "in no step did the completions of a group differ in reward", error_type="NothingLearned")
    error = failure_of((silent,))
    assert isinstance(error, Diverged) and error.exit_code == 4
    assert "ease the problems" in str(error) and "on_divergence" not in str(error)


def test_an_attempt_that_cannot_fit_is_skipped_without_a_process_and_seen_in_mlflow(tmp_path: Path) -> None:
    params, hardware = Params.model_validate({"memory": {"budget_mb": 100}}), hardware_of("cpu_epyc_9r14")
    plan = plan_precision(hardware, params)
    version = ArtifactVersion(path=tmp_path / "nothing", dvc_hash="0.dir", size_bytes=0, location="nowhere")
    source = SourceVersion(git_commit=None, dirty=None)
    run = RunFolder(name="r", run_dir=tmp_path / "r", started_at="now", flow_run_id="f", source=source)
    tracked = open_parent_run(run, tmp_path / "state", params, hardware, plan)
    dataset = DatasetVersion(version=version, num_train=1, num_eval=1, num_dropped=0)
    setting = RunSetting(run=run, tracked=tracked, hardware=hardware, plan=plan, base_model=version, dataset=dataset)
    prediction = MemoryPrediction(
        peak_bytes=200 * MB,
        least_bytes=180 * MB,
        most_bytes=300 * MB,
        phase="rollout",
        categories={"weights": 200 * MB},
        phases={},
        available_bytes=100 * MB,
    )
    attempt = plan.attempts[0].model_copy(update={"prediction": prediction, "resume_from": Path("states/checkpoint-5")})
    with disable_run_logger():
        done = train.fn(attempt, setting, params)
    assert (done.outcome.status, done.outcome.steps_done) == ("skipped", 5) and done.outcome.failure is not None
    for words in ("predicted peak 200 MB (180 to 300) in the rollout", "100 MB available: does not fit", "memory.preflight=warn"):
        assert words in done.outcome.failure.message
    assert sorted(path.name for path in done.attempt_dir.iterdir() if path.suffix) == ["attempt.json", "outcome.json"]
    follows = next_attempt(plan, (done,), params)
    assert follows is not None and follows.label == "retry" and follows.resume_from == Path("states/checkpoint-5")
    error = failure_of((done,))
    assert isinstance(error, NothingFitted) and "does not fit" in str(error)
    with reaching(tracked.tracking_uri, "look") as client:
        child = next(item for item in client.search_runs([tracked.experiment_id]) if item.info.run_id != tracked.run_id)
    assert (child.info.status, child.data.tags["outcome.status"]) == ("FAILED", "skipped")
    assert (child.data.metrics["predicted_peak_mb"], child.data.metrics["available_memory_mb"]) == (200, 100)
