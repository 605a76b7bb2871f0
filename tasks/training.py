"""Run one attempt of the plan as a child process and log it to MLflow while it runs."""

import time
from collections.abc import Callable

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.attempt_files import state_step, unfinished_outcome
from tasks.attempt_log import AttemptLog
from tasks.engines.catalog import ENGINES
from tasks.errors import AttemptFailed, Diverged, HalfstepError, NothingFitted, NothingLearned, RefusedInput
from tasks.files import write_record
from tasks.host_memory import cgroup_oom_kills
from tasks.memory import MB
from tasks.next_attempt import SHORT, preemptions, run_status
from tasks.params import Params
from tasks.processes import run_program
from tasks.progress import TrainingProgress
from tasks.records import Attempt, Failure, FinishedAttempt, Hardware, Outcome, RunSetting, TrainingJob
from tasks.report import attempt_text, prediction_text
from tasks.run_folder import interrupted_outcome


@task(cache_policy=NO_CACHE, task_run_name="train {attempt.name}")
def train(attempt: Attempt, setting: RunSetting, params: Params) -> FinishedAttempt:
    """Run `attempt` to its end and return what came of it; a stop from outside is recorded, then raised on."""
    logger = get_run_logger()
    attempt_dir = setting.run.run_dir / attempt.name
    job = TrainingJob(
        attempt=attempt,
        params=params.model_dump(mode="json"),
        dataset_dir=setting.dataset.version.path,
        base_model_dir=setting.base_model.path,
        attempt_dir=attempt_dir,
    )
    write_record(attempt_dir / "attempt.json", job)
    logger.info("%s: %s", attempt.name, attempt.reason)
    log = AttemptLog(setting.tracked, attempt, attempt_dir, logger.warning)
    try:
        outcome = _predicted_shortage(job, params) or _run_child(job, setting.hardware, log, logger.info)
    except BaseException:
        outcome = interrupted_outcome(job)
        log.close(outcome, patience_seconds=5.0)
        raise
    write_record(attempt_dir / "outcome.json", outcome)
    log.close(outcome, patience_seconds=20.0)
    done = FinishedAttempt(attempt=attempt, outcome=outcome, attempt_dir=attempt_dir)
    logger.info("%s%s", attempt_text(done), f": {outcome.failure.message}" if outcome.failure else "")
    return done


def _predicted_shortage(job: TrainingJob, params: Params) -> Outcome | None:
    """Return the outcome of an attempt that is not worth a process, if it is none."""
    prediction = job.attempt.prediction
    if prediction is None or prediction.fits or params.memory.preflight != "skip":
        return None
    failure = Failure(
        phase=prediction.phase,
        error_type="PredictedShortage",
        message=f"{prediction_text(prediction)}; memory.preflight=warn tries it all the same",
        requested_bytes=prediction.peak_bytes,
        available_bytes=prediction.available_bytes,
    )
    return unfinished_outcome(job).model_copy(update={"status": "skipped", "shortage": "device", "failure": failure})


def _run_child(job: TrainingJob, hardware: Hardware, log: AttemptLog, say: Callable[[str], None]) -> Outcome:
    engine = ENGINES[job.attempt.engine]
    command = engine.command(job, hardware)
    progress = TrainingProgress(job.attempt_dir, state_step(job.attempt.resume_from), int(job.params["training"]["max_steps"]), say)
    for note in command.notes:
        say(note)
    kills_before, started = cgroup_oom_kills(), time.monotonic()

    def watch() -> None:
        progress.update()
        log.send()

    log_path = job.attempt_dir / "train.log"
    ended = run_program(command.module, command.arguments, log_path, environment=command.environment, on_tick=watch)
    seconds = time.monotonic() - started
    progress.update(final=True)
    outcome = engine.outcome(job, ended, hardware, cgroup_oom_kills() - kills_before)
    return outcome.model_copy(update={"process_seconds": seconds})


def failure_of(finished: tuple[FinishedAttempt, ...], what_fits: str = "") -> HalfstepError:
    """Return the error that says why no attempt succeeded, with what was tried, what was there and what would fit."""
    last = finished[-1]
    outcome, failure = last.outcome, last.outcome.failure
    log = f"The log is {last.attempt_dir / 'train.log'}." if outcome.status != "skipped" else "No training process was started for it."
    message, kind = (failure.message, failure.error_type) if failure else (outcome.status, "")
    if kind == NothingLearned.__name__:
        remedy = "Another precision would not change that: look at what the scorer returns, ease the problems, or sample more widely"
        return NothingLearned(f"{message}. {remedy} (training.num_generations, training.temperature).\n{log}")
    if outcome.status in (*SHORT, "diverged"):
        return _used_up(finished, log, what_fits)
    if kind == RefusedInput.__name__:
        return RefusedInput(message)
    if outcome.status == "cancelled":
        times = f"{preemptions(finished)} times in a row, with no new training state in between"
        remedy = f"Find what ends it, or lower training.save_steps; then go on with --resume {last.attempt_dir.parent.name}."
        return AttemptFailed(f"{last.attempt.name}: {message}, {times}.\n{remedy} {log}")
    where = f" in {failure.phase}" if failure and failure.phase else ""
    named = f"{kind}: " if kind not in ("", "ProcessDied") else ""
    return AttemptFailed(f"{last.attempt.name} failed{where}: {named}{message}\nNot retried: no other precision can mend this. {log}")


def _used_up(finished: tuple[FinishedAttempt, ...], log: str, what_fits: str) -> HalfstepError:
    tried = "\n".join(f"  {attempt_text(done)}{_cause(done)}" for done in finished)
    if run_status(finished) != "diverged":
        ran_out = "no attempt of the plan fitted in memory"
        lower = "Raise memory.budget_mb, or lower training.per_device_train_batch_size (and raise gradient_accumulation_steps)."
        resume = f"python -m flows.retrain --resume {finished[-1].attempt_dir.parent.name}"
        remedy = f"{what_fits or lower}\nThis run can be gone on with, too: {resume} memory.budget_mb=MORE, or with such levers behind it."
        if finished[-1].outcome.shortage == "host":
            ran_out = "host memory ran out"
            remedy = "Raise the host's memory or its limit, or stop what else takes it; on an accelerator no lever frees the host's memory."
        return NothingFitted(f"{ran_out} ({len(finished)} tried):\n{tried}\n{remedy}\n{log}")
    labels = " and ".join(dict.fromkeys(done.attempt.precision.label for done in finished if done.outcome.status == "diverged"))
    wider = "Start again with precision.on_divergence=next, which goes on in a wider precision, or with a lower training.learning_rate."
    if any(done.attempt.label == "fallback" for done in finished):
        wider = "Give memory.retries an entry with precision fp32 and a larger micro_batch_divisor, or lower training.learning_rate."
    if "fp32" in labels:
        wider = "No precision mends what diverges in fp32: lower training.learning_rate, and look at the rewards."
    return Diverged(f"the run diverged in {labels}, and the plan has nothing left to try:\n{tried}\n{wider}\n{log}")


def _cause(done: FinishedAttempt) -> str:
    failure, prediction = done.outcome.failure, done.attempt.prediction
    if failure is None or done.outcome.status != "out_of_memory" or done.outcome.shortage == "host":
        return f": {failure.message}" if failure else ""
    asked = f", asked for {failure.requested_bytes / MB:.1f} MB more" if failure.requested_bytes else ""
    asked += f" with {failure.available_bytes / MB:.1f} MB available" if failure.available_bytes is not None else ""
    return asked + (f"; {prediction_text(prediction)}" if prediction else "")
