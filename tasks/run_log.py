"""The run as MLflow and the run folder keep it: opened, concluded, and closed when the flow is cut off."""

from datetime import UTC, datetime
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging import get_logger, get_run_logger

from tasks.attempt_log import deliver
from tasks.errors import HalfstepError
from tasks.files import write_aside, write_record
from tasks.next_attempt import run_status
from tasks.params import Params
from tasks.places import STATE_DIR
from tasks.progress import draw_curves, duration, joined_steps, lost_steps
from tasks.records import (
    ArtifactVersion,
    Evaluation,
    FinishedAttempt,
    Hardware,
    PrecisionPlan,
    RunFolder,
    RunRecord,
    RunSetting,
    TrackedRun,
)
from tasks.report import summary_text
from tasks.tracking.runs import close_open_runs, close_parent_run, log_dataset, open_parent_run

NETWORK_RETRIES = 2


@task(cache_policy=NO_CACHE, retries=NETWORK_RETRIES, retry_delay_seconds=5)
def start_tracking(run: RunFolder, params: Params, hardware: Hardware, plan: PrecisionPlan) -> TrackedRun:
    """Open the run in MLflow, or open the one of an earlier start again."""
    return open_parent_run(run, STATE_DIR, params, hardware, plan)


@task(cache_policy=NO_CACHE, retries=NETWORK_RETRIES, retry_delay_seconds=5)
def record_inputs(setting: RunSetting, params: Params) -> None:
    """Name the dataset of the run in MLflow, as people know it."""
    name = params.dataset.family if params.dataset.source == "reasoning_gym" else params.dataset.source
    log_dataset(setting.tracked, setting.dataset, name)


@task(cache_policy=NO_CACHE, retries=NETWORK_RETRIES, retry_delay_seconds=5)
def conclude_run(
    setting: RunSetting,
    params: Params,
    finished: tuple[FinishedAttempt, ...],
    evaluation: Evaluation | None = None,
    checkpoint: ArtifactVersion | None = None,
) -> RunRecord:
    """Write and log the record of a run, with its summary and curves; why a run failed matters more than MLflow being away."""
    lost = lost_steps(finished)
    record = RunRecord(
        **dict(setting),
        status=run_status(finished),
        params=params.model_dump(mode="json"),
        attempts=finished,
        evaluation=evaluation,
        checkpoint=checkpoint,
        lost_steps=len(lost),
        lost_tokens=round(sum(step["tokens_per_second"] * step["step_time_ms"] / 1000 for step in lost)),
    )
    try:
        _keep(record)
    except HalfstepError as error:
        if record.status == "succeeded":
            later = f"python -m flows.retrain --resume {record.run_name}"
            raise HalfstepError(f"{error}\nThe run itself is done and its checkpoint is stored; log it later with: {later}") from error
        get_run_logger().warning(str(error))
    return record


def _keep(record: RunRecord) -> None:
    run_dir, steps = record.run.run_dir, joined_steps(record.attempts)
    summary = summary_text(record, steps, duration(datetime.now(UTC) - datetime.fromisoformat(record.run.started_at)))
    write_aside(run_dir / "summary.txt", summary + "\n")
    for done in record.attempts:
        deliver(record.tracked, done, get_run_logger().warning)
    curves = draw_curves(record.attempts, record.run_name, run_dir / "curves.png")
    close_parent_run(record, steps, (curves, run_dir / "summary.txt"))
    # last: a run without it can be resumed
    write_record(run_dir / "run.json", record)
    create_markdown_artifact(f"```\n{summary}\n```", key="retrain-summary", description=f"Run {record.run_name}")
    get_run_logger().info("summary:\n%s", summary)


def close_runs(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Leave none of the flow run's MLflow runs open (a flow hook): one that did not fail was cut off."""
    try:
        close_open_runs(STATE_DIR, str(flow_run.id), "FAILED" if state.is_failed() else "KILLED")
    except HalfstepError as error:
        # what ended the flow has been said already; this must not bury it
        get_logger("run_log").warning("runs in MLflow stay open: %s", str(error).splitlines()[0])
