"""The runs in MLflow: one parent for a run of the flow, one child for each attempt."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag

from tasks.params import Params
from tasks.records import (
    Attempt,
    DatasetVersion,
    Evaluation,
    FinishedAttempt,
    Hardware,
    Outcome,
    PrecisionPlan,
    RunRecord,
    SourceVersion,
    Status,
    TrackedRun,
)
from tasks.tracking.entities import MAX_TAG_LENGTH, fit, flatten, log_metrics, log_params, log_tags
from tasks.tracking.location import experiment_name, open_experiment, reaching, tracking_uri, without_passwords
from tasks.tracking.metrics import read_lines

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
RUN_STATUS: dict[Status, RunStatus] = {
    "succeeded": "FINISHED",
    "skipped": "FAILED",
    "out_of_memory": "FAILED",
    "diverged": "FAILED",
    "failed": "FAILED",
    "cancelled": "KILLED",
}
FLOW_RUN_TAG = "prefect.flow_run_id"
PARENT_TAG = "mlflow.parentRunId"
MB = 2**20


def open_parent_run(
    run_name: str,
    state_dir: Path,
    *,
    params: Params,
    hardware: Hardware,
    plan: PrecisionPlan,
    source: SourceVersion,
    flow_run_id: str | None = None,
) -> TrackedRun:
    """Open the run of a whole flow with what was asked, found and decided.

    Called again for the same flow run (a retry after a network fault), it goes on with the run it had opened.
    """
    client, uri, experiment_id = open_experiment(state_dir)
    tags = {
        "halfstep.run_name": run_name,
        FLOW_RUN_TAG: flow_run_id,
        "mlflow.source.git.commit": source.git_commit,
        "git.commit": source.git_commit,
        "git.dirty": source.dirty,
        "plan.reason": plan.reason,
        "plan.attempts": ", ".join(attempt.name for attempt in plan.attempts),
        "plan.ruled_out": "; ".join(f"{other.precision}: {other.reason}" for other in plan.ruled_out) or None,
        "hardware.device": f"{hardware.device_count} x {hardware.device_name} ({hardware.device_type})",
        "hardware.bf16": f"{hardware.bf16.level}: {hardware.bf16.fact}",
        "hardware.fp16": f"{hardware.fp16.level}: {hardware.fp16.fact}",
        "hardware.memory_free_mb": hardware.memory_free_bytes // MB,
    }
    resolved = params.model_dump(mode="json")
    with reaching(uri, f"open run {run_name!r}"):
        same = {FLOW_RUN_TAG: flow_run_id, "halfstep.run_name": run_name} if flow_run_id else None
        run_id = _open(client, experiment_id, run_name, tags, same)
        log_params(client, run_id, flatten(resolved))
        client.log_text(run_id, hardware.model_dump_json(indent=2), "hardware.json")
        client.log_text(run_id, plan.model_dump_json(indent=2), "plan.json")
        client.log_text(run_id, yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), "params.yaml")
    return TrackedRun(tracking_uri=uri, experiment_id=experiment_id, run_id=run_id)


def reopen_run(run: TrackedRun, flow_run_id: str | None) -> None:
    """Set a run to RUNNING again, under the flow run that goes on with it."""
    client = MlflowClient(run.tracking_uri)
    with reaching(run.tracking_uri, f"open run {run.run_id} again"):
        log_tags(client, run.run_id, {FLOW_RUN_TAG: flow_run_id})
        client.update_run(run.run_id, status="RUNNING")


def log_file(run: TrackedRun, path: Path) -> None:
    """Log a file as an artifact of a run."""
    with reaching(run.tracking_uri, f"log {path.name}"):
        MlflowClient(run.tracking_uri).log_artifact(run.run_id, str(path))


def open_attempt_run(parent: TrackedRun, attempt: Attempt) -> TrackedRun:
    """Open the child run of one attempt."""
    client = MlflowClient(parent.tracking_uri)
    with reaching(parent.tracking_uri, f"open the run of attempt {attempt.name!r}"):
        inherited = client.get_run(parent.run_id).data.tags
        tags = {PARENT_TAG: parent.run_id, FLOW_RUN_TAG: inherited.get(FLOW_RUN_TAG), "attempt.reason": attempt.reason}
        same = {PARENT_TAG: parent.run_id, "mlflow.runName": attempt.name}
        run_id = _open(client, parent.experiment_id, attempt.name, tags, same)
        shown = attempt.model_dump(mode="json", exclude={"reason"})
        log_params(client, run_id, {**flatten(shown), "precision": attempt.precision.label})
    return TrackedRun(tracking_uri=parent.tracking_uri, experiment_id=parent.experiment_id, run_id=run_id)


def close_attempt_run(run: TrackedRun, outcome: Outcome, attempt_dir: Path) -> None:
    """Close an attempt's run with its outcome, the precision that was observed, and its log."""
    observed = outcome.observed
    failure = outcome.failure
    tags: dict[str, object] = {"outcome.status": outcome.status, "outcome.shortage": outcome.shortage}
    if failure:
        tags |= {"outcome.phase": failure.phase, "outcome.error_type": failure.error_type, "outcome.message": failure.message}
    if observed:
        for phase in ("forward", "backward", "rollout", "trainable_weights"):
            tags[f"observed.{phase}"] = ", ".join(getattr(observed, phase))
        tags["observed.scaler_live"] = observed.scaler_live
    metrics = {
        "peak_memory_mb": _megabytes(outcome.peak_memory_bytes),
        "steps_done": outcome.steps_done,
        "skipped_steps": outcome.skipped_steps,
        "final_loss_scale": outcome.final_loss_scale,
    }
    client = MlflowClient(run.tracking_uri)
    with reaching(run.tracking_uri, "close the run of an attempt"):
        log_tags(client, run.run_id, tags)
        # a name that the steps logged too keeps one point a step
        logged = client.get_run(run.run_id).data.metrics
        log_metrics(client, run.run_id, {name: value for name, value in metrics.items() if logged.get(name) != value}, outcome.steps_done)
        client.log_text(run.run_id, outcome.model_dump_json(indent=2), "outcome.json")
        if (attempt_dir / "train.log").is_file():
            client.log_artifact(run.run_id, str(attempt_dir / "train.log"))
        client.set_terminated(run.run_id, RUN_STATUS[outcome.status])


def log_dataset(run: TrackedRun, dataset: DatasetVersion, name: str, context: str = "training") -> None:
    """Name the dataset a run used: searchable by its hash's first 8 digits, with the command that brings it back."""
    version = dataset.version
    source = {"dvc_hash": version.dvc_hash, "location": version.location, "restore": restore_command(version.dvc_hash)}
    counts = dataset.model_dump(include={"num_train", "num_eval", "num_dropped"})
    entity = Dataset(
        name, version.dvc_hash[:8], "dvc", json.dumps(source), profile=json.dumps({**counts, "size_bytes": version.size_bytes})
    )
    client = MlflowClient(run.tracking_uri)
    with reaching(run.tracking_uri, "log the dataset"):
        client.log_inputs(run.run_id, [DatasetInput(entity, [InputTag("mlflow.data.context", context)])])
        log_tags(client, run.run_id, {"dataset.dvc_hash": version.dvc_hash, "dataset.restore": source["restore"]})


def close_parent_run(run: TrackedRun, record: RunRecord) -> None:
    """Close the run of a whole flow: its record, its evaluation, its checkpoint, and headline figures to compare runs by."""
    tags: dict[str, object] = {"outcome.status": record.status, "base_model.dvc_hash": record.base_model.dvc_hash}
    if record.checkpoint:
        tags |= {
            "checkpoint.dvc_hash": record.checkpoint.dvc_hash,
            "checkpoint.size_mb": round(record.checkpoint.size_bytes / MB, 1),
            "checkpoint.restore": restore_command(record.checkpoint.dvc_hash),
        }
    metrics: dict[str, float | None] = {}
    if record.attempts:
        last = record.attempts[-1]
        tags |= {"precision.ran": last.attempt.precision.label, "precision.reason": last.attempt.reason}
        metrics = {
            "peak_memory_mb": _megabytes(last.outcome.peak_memory_bytes),
            "step_time_ms": last.outcome.step_time_ms,
            "tokens_per_second": last.outcome.tokens_per_second,
            **_reward_ends(record.attempts),
        }
    client = MlflowClient(run.tracking_uri)
    with reaching(run.tracking_uri, f"close run {record.run_name!r}"):
        shown = record.model_copy(update={"tracking_uri": without_passwords(record.tracking_uri)})
        client.log_text(run.run_id, shown.model_dump_json(indent=2), "run.json")
        if record.evaluation:
            metrics |= _evaluation_metrics(record.evaluation)
            _log_samples(client, run.run_id, record.evaluation)
        log_metrics(client, run.run_id, metrics)
        log_tags(client, run.run_id, tags)
        client.set_terminated(run.run_id, RUN_STATUS[record.status])


def close_open_runs(state_dir: Path, flow_run_id: str, status: RunStatus) -> int:
    """Close every run of a Prefect flow run that is still RUNNING, parent and attempts; return how many there were."""
    uri = tracking_uri(state_dir)
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        return 0
    client = MlflowClient(uri)
    with reaching(uri, f"close the runs of flow run {flow_run_id}"):
        experiment = client.get_experiment_by_name(experiment_name())
        running = _running(client, experiment.experiment_id, {FLOW_RUN_TAG: flow_run_id}) if experiment else []
        for run_id in running:
            client.set_terminated(run_id, status)
    return len(running)


def restore_command(dvc_hash: str) -> str:
    """Return the command that brings a versioned folder back."""
    return f"python -m tasks.versioning restore {dvc_hash} <empty folder>"


def _open(client: MlflowClient, experiment_id: str, name: str, tags: Mapping[str, object], same: Mapping[str, str] | None) -> str:
    running = _running(client, experiment_id, same) if same else []
    if running:
        return running[0]
    texts = {key: fit(value, MAX_TAG_LENGTH) for key, value in tags.items() if value is not None}
    return str(client.create_run(experiment_id, tags=texts, run_name=name).info.run_id)


def _running(client: MlflowClient, experiment_id: str, tags: Mapping[str, str]) -> list[str]:
    wanted = " and ".join(["attributes.status = 'RUNNING'", *(f"tags.`{key}` = '{value}'" for key, value in tags.items())])
    return [run.info.run_id for run in client.search_runs([experiment_id], wanted)]


def _megabytes(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / MB


def _reward_ends(attempts: tuple[FinishedAttempt, ...]) -> dict[str, float | None]:
    rewards: dict[int, float] = {}
    for finished in attempts:
        lines = (line for _, line in read_lines(finished.attempt_dir / "metrics.jsonl") if line)
        own = {line.step: line.metrics["reward"] for line in lines if "reward" in line.metrics}
        # an attempt replaces what earlier ones did after the state it went on from
        rewards = {step: reward for step, reward in rewards.items() if step < min(own, default=step + 1)} | own
    return {"reward_first": rewards[min(rewards)], "reward_last": rewards[max(rewards)]} if rewards else {}


def _evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    rows = {"gained": float(evaluation.num_gained), "lost": float(evaluation.num_lost), "p_value": evaluation.p_value}
    for name, accuracy in {"base": evaluation.base, "tuned": evaluation.tuned}.items():
        rows |= {f"accuracy_{name}": accuracy.share, f"accuracy_{name}_low": accuracy.low, f"accuracy_{name}_high": accuracy.high}
        rows[f"mean_score_{name}"] = accuracy.mean_score
    return rows


def _log_samples(client: MlflowClient, run_id: str, evaluation: Evaluation) -> None:
    rows = [sample.model_dump() for sample in evaluation.samples]
    # log_table appends: a repeated close must not double the rows
    if rows and not any(item.path == "samples.json" for item in client.list_artifacts(run_id)):
        client.log_table(run_id, {key: [row[key] for row in rows] for key in rows[0]}, "samples.json")
