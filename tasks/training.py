"""Run one attempt of the plan as a child process and log it to MLflow while it runs."""

from collections.abc import Callable

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.attempt_files import state_step
from tasks.attempt_log import AttemptLog
from tasks.engines.catalog import ENGINES
from tasks.errors import AttemptFailed, Diverged, HalfstepError, NothingFitted, NothingLearned, RefusedInput
from tasks.files import write_record
from tasks.host_memory import cgroup_oom_kills
from tasks.memory import MB
from tasks.next_attempt import run_status
from tasks.params import Params
from tasks.processes import ProgramExit, run_program
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
    message = f"{prediction_text(prediction)}; memory.preflight=warn tries it all the same"
    failure = Failure(
        phase=prediction.phase,
        error_type="PredictedShortage",
        message=message,
        requested_bytes=prediction.peak_bytes,
        available_bytes=prediction.available_bytes,
    )
    resumed = job.attempt.resume_from
    return Outcome(
        status="skipped",
        shortage="device",
        first_step=state_step(resumed) if resumed else 0,
        steps_done=state_step(resumed) if resumed else 0,
        total_steps=params.training.max_steps,
        last_state_dir=resumed,
        failure=failure,
    )


def _run_child(job: TrainingJob, hardware: Hardware, log: AttemptLog, say: Callable[[str], None]) -> Outcome:
    engine = ENGINES[job.attempt.engine]
    command = engine.command(job, hardware)
    first_step = state_step(job.attempt.resume_from) if job.attempt.resume_from else 0
    progress = TrainingProgress(job.attempt_dir, first_step, int(job.params["training"]["max_steps"]), say)
    kills_before = cgroup_oom_kills()

    def watch() -> None:
        progress.update()
        log.send()

    ended: ProgramExit = run_program(
        command.module, command.arguments, job.attempt_dir / "train.log", environment=command.environment, on_tick=watch
    )
    progress.update(final=True)
    return engine.outcome(job, ended, hardware, cgroup_oom_kills() - kills_before)


def failure_of(finished: tuple[FinishedAttempt, ...]) -> HalfstepError:
    """Return the error that says why no attempt succeeded, with what was tried and what was there."""
    last = finished[-1]
    outcome, failure = last.outcome, last.outcome.failure
    log = f"The log is {last.attempt_dir / 'train.log'}."
    if outcome.status in ("out_of_memory", "skipped", "diverged"):
        return _used_up(finished, log)
    message = failure.message if failure else outcome.status
    if failure is not None and failure.error_type == "RefusedInput":
        return RefusedInput(message)
    where = f" in {failure.phase}" if failure and failure.phase else ""
    kind = f"{failure.error_type}: " if failure and failure.error_type != "ProcessDied" else ""
    return AttemptFailed(f"{last.attempt.name} failed{where}: {kind}{message}\nNot retried: no other precision can mend this. {log}")


def _used_up(finished: tuple[FinishedAttempt, ...], log: str) -> HalfstepError:
    failure = finished[-1].outcome.failure
    if failure and failure.error_type == NothingLearned.__name__:
        remedy = "Another precision would not change that: look at what the scorer returns, ease the problems, or sample more widely"
        remedy += " (training.num_generations, training.temperature)."
        return NothingLearned(f"{failure.message}. {remedy}\n{log}")
    diverged = [done for done in finished if done.outcome.status == "diverged"]
    tried = "\n".join(f"  {attempt_text(done)}{_cause(done)}" for done in finished)
    if run_status(finished) != "diverged":
        remedy = "Raise memory.budget_mb, or lower training.per_device_train_batch_size (and raise gradient_accumulation_steps)."
        return NothingFitted(f"no attempt of the plan fitted in memory ({len(finished)} tried):\n{tried}\n{remedy}\n{log}")
    labels = " and ".join(dict.fromkeys(done.attempt.precision.label for done in diverged))
    wider = "Start again with precision.on_divergence=next, which goes on in a wider precision, or with a lower training.learning_rate."
    if any(done.attempt.label == "fallback" for done in finished):
        wider = "Give memory.retries an entry with precision fp32 and a larger micro_batch_divisor, or lower training.learning_rate."
    if "fp32" in labels:
        wider = "No precision mends what diverges in fp32: lower training.learning_rate, and look at the rewards."
    return Diverged(f"the run diverged in {labels}, and the plan has nothing left to try:\n{tried}\n{wider}\n{log}")


def _cause(done: FinishedAttempt) -> str:
    failure = done.outcome.failure
    if failure is None or done.outcome.status != "out_of_memory":
        return f": {failure.message}" if failure else ""
    asked = f", asked for {failure.requested_bytes / MB:.1f} MB more" if failure.requested_bytes else ""
    return asked + (f" with {failure.available_bytes / MB:.1f} MB available" if failure.available_bytes is not None else "")
