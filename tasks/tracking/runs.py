"""The runs in MLflow: one parent for a run of the flow, one child for each attempt."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric

from tasks.memory import MB
from tasks.params import Params, dotted
from tasks.records import Attempt, DatasetVersion, Evaluation, FinishedAttempt, Hardware, PrecisionPlan, RunFolder, RunRecord, TrackedRun
from tasks.tracking.entities import as_metrics, entity_name, log_params, log_values
from tasks.tracking.location import experiment_name, open_experiment, reaching, tracking_uri

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
# every other status is FAILED
RUN_STATUS: dict[str, RunStatus] = {"succeeded": "FINISHED", "cancelled": "KILLED"}
FLOW_RUN_TAG = "prefect.flow_run_id"
# of a whole run, joined over its attempts
CURVES = ("loss", "reward", "grad_norm", "loss_scale")
# of a step, beside its metrics
STEP_KEYS = ("step", "time")


def open_parent_run(run: RunFolder, state_dir: Path, params: Params, hardware: Hardware, plan: PrecisionPlan) -> TrackedRun:
    """Open the run of a whole flow with what was asked, found and decided.

    Called again (a retry after a network fault, a resume), it goes on with the run it had opened.
    """
    _, uri, experiment_id = open_experiment(state_dir)
    tags = {
        FLOW_RUN_TAG: run.flow_run_id,
        "mlflow.source.git.commit": run.source.git_commit,
        "git.commit": run.source.git_commit,
        "git.dirty": run.source.dirty,
        "params.set_on_resume": "; ".join(run.changes) or None,
        "plan.reason": plan.reason,
        "plan.attempts": ", ".join(attempt.name for attempt in plan.attempts),
        "plan.ruled_out": "; ".join(f"{other.precision}: {other.reason}" for other in plan.ruled_out) or None,
        "hardware.device": f"{hardware.device_count} x {hardware.device_name} ({hardware.device_type})",
        "hardware.bf16": f"{hardware.bf16.level}: {hardware.bf16.fact}",
        "hardware.fp16": f"{hardware.fp16.level}: {hardware.fp16.fact}",
        "hardware.memory_free_mb": hardware.memory_free_bytes // MB,
    }
    resolved = params.model_dump(mode="json")
    with reaching(uri, f"open run {run.name!r}") as client:
        same = {"halfstep.run_name": run.name, "halfstep.started_at": run.started_at}
        run_id = _open(client, experiment_id, run.name, same, tags)
        client.update_run(run_id, status="RUNNING")
        # a param cannot be logged again with another value: what a resume set is in a tag, and whole in params.yaml
        kept = client.get_run(run_id).data.params
        log_params(client, run_id, {key: value for key, value in dotted(resolved).items() if entity_name(key) not in kept})
        client.log_text(run_id, hardware.model_dump_json(indent=2), "hardware.json")
        client.log_text(run_id, plan.model_dump_json(indent=2), "plan.json")
        client.log_text(run_id, yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), "params.yaml")
    return TrackedRun(tracking_uri=uri, experiment_id=experiment_id, run_id=run_id)


def open_attempt_run(parent: TrackedRun, attempt: Attempt) -> TrackedRun:
    """Open the child run of one attempt, or the one that was opened for it before."""
    with reaching(parent.tracking_uri, f"open the run of attempt {attempt.name!r}") as client:
        inherited = client.get_run(parent.run_id).data.tags
        same = {"mlflow.parentRunId": parent.run_id, "mlflow.runName": attempt.name}
        tags = {FLOW_RUN_TAG: inherited.get(FLOW_RUN_TAG), "attempt.reason": attempt.reason}
        if attempt.variant:
            tags |= {"variant": attempt.variant, "seed": str(attempt.seed), "comparison": inherited["mlflow.runName"]}
        run_id = _open(client, parent.experiment_id, attempt.name, same, tags)
        left_out = {"reason", "prediction", "effects"} | ({"variant", "seed"} if not attempt.variant else set())
        shown = attempt.model_dump(mode="json", exclude=left_out)
        log_params(client, run_id, {**dotted(shown), "precision": attempt.precision.label})
        if attempt.prediction is not None and attempt.prediction.available_bytes is not None:
            sizes = {"predicted_peak_mb": attempt.prediction.peak_bytes, "available_memory_mb": attempt.prediction.available_bytes}
            sizes |= {f"predicted_mb/{name}": size for name, size in attempt.prediction.categories.items()}
            for effect in attempt.effects:
                by_category = {f"freed_mb/{effect.lever}.{name}": size for name, size in effect.freed.items()}
                sizes |= {f"freed_mb/{effect.lever}": effect.freed_bytes, **by_category}
            log_values(client, run_id, {}, {name: size / MB for name, size in sizes.items()})
    return parent.model_copy(update={"run_id": run_id})


def log_steps(run: TrackedRun, steps: Sequence[Mapping[str, float]]) -> None:
    """Log the metrics of some steps, as tasks.attempt_files.read_steps gives them."""
    points: list[Metric] = []
    for step in steps:
        metrics = {name: value for name, value in step.items() if name not in STEP_KEYS}
        points += as_metrics(metrics, round(step["time"] * 1000), int(step["step"]))
    with reaching(run.tracking_uri, "log metrics") as client:
        client.log_batch(run.run_id, metrics=points)


def close_attempt_run(run: TrackedRun, done: FinishedAttempt) -> None:
    """Close an attempt's run with its outcome, the precision that was observed, and its log."""
    outcome = done.outcome
    failure = outcome.failure.model_dump(include={"phase", "error_type", "message", "rank"}) if outcome.failure else {}
    said = outcome.model_dump(include={"status", "shortage"}) | failure
    tags = {f"outcome.{name}": value for name, value in said.items()}
    tags |= {f"observed.{name}": ", ".join(seen) if isinstance(seen, tuple) else seen for name, seen in outcome.observed or ()}
    tags |= {f"warning.{item.name}": f"step {item.step}: {item.message}" for item in outcome.warnings}
    metrics = outcome.model_dump(include={"steps_done", "skipped_steps", "final_loss_scale"})
    metrics |= _peaks(done)
    metrics |= {f"peak_memory_mb/device_{rank}": size / MB for rank, size in enumerate(outcome.peak_memory_by_device) if size}
    with reaching(run.tracking_uri, "close the run of an attempt") as client:
        # a name that the steps logged too keeps one point a step
        logged = client.get_run(run.run_id).data.metrics
        new = {name: value for name, value in metrics.items() if logged.get(name) != value}
        log_values(client, run.run_id, tags, new, outcome.steps_done)
        client.log_text(run.run_id, outcome.model_dump_json(indent=2), "outcome.json")
        if (done.attempt_dir / "train.log").is_file():
            client.log_artifact(run.run_id, str(done.attempt_dir / "train.log"))
        client.set_terminated(run.run_id, RUN_STATUS.get(outcome.status, "FAILED"))


def log_dataset(run: TrackedRun, dataset: DatasetVersion, name: str) -> None:
    """Name the dataset a run trains on: searchable by its hash's first 8 digits, with the command that brings it back."""
    version = dataset.version
    source = {"dvc_hash": version.dvc_hash, "location": version.location, "restore": restore_command(version.dvc_hash)}
    profile = {**dataset.model_dump(exclude={"version"}), "size_bytes": version.size_bytes}
    entity = Dataset(name, version.dvc_hash[:8], "dvc", json.dumps(source), profile=json.dumps(profile))
    with reaching(run.tracking_uri, "log the dataset") as client:
        client.log_inputs(run.run_id, [DatasetInput(entity, [InputTag("mlflow.data.context", "training")])])
        log_values(client, run.run_id, {"dataset.dvc_hash": version.dvc_hash, "dataset.restore": source["restore"]}, {})


def close_parent_run(record: RunRecord, steps: list[dict[str, float]], files: tuple[Path, ...]) -> None:
    """Close the run of a whole flow: its record, its evaluation, its checkpoint, and headline figures to compare runs by.

    `steps` are the metrics of each step that counts, oldest first; `files` are kept as they are.
    """
    run, last = record.tracked, record.attempts[-1]
    tags: dict[str, object] = {
        "outcome.status": record.status,
        "base_model.dvc_hash": record.base_model.dvc_hash,
        "precision.ran": last.attempt.precision.label,
        "precision.reason": last.attempt.reason,
    }
    if record.checkpoint:
        tags |= {
            "checkpoint.dvc_hash": record.checkpoint.dvc_hash,
            "checkpoint.size_mb": round(record.checkpoint.size_bytes / MB, 1),
            "checkpoint.restore": restore_command(record.checkpoint.dvc_hash),
        }
    metrics = last.outcome.model_dump(include={"step_time_ms", "tokens_per_second"})
    metrics |= record.model_dump(include={"lost_steps", "lost_tokens"})
    metrics |= _peaks(last)
    if rewards := [step["reward"] for step in steps if "reward" in step]:
        metrics |= {"reward_first": rewards[0], "reward_last": rewards[-1]}
    log_steps(run, [{name: step[name] for name in (*STEP_KEYS, *CURVES) if name in step} for step in steps])
    with reaching(run.tracking_uri, f"close run {record.run_name!r}") as client:
        for path in files:
            client.log_artifact(run.run_id, str(path))
        client.log_text(run.run_id, record.model_dump_json(indent=2), "run.json")
        if record.evaluation:
            metrics |= _evaluation_metrics(record.evaluation)
            log_rows(client, run.run_id, [sample.model_dump() for sample in record.evaluation.samples], "samples.json")
        log_values(client, run.run_id, tags, metrics)
        client.set_terminated(run.run_id, RUN_STATUS.get(record.status, "FAILED"))


def close_open_runs(state_dir: Path, flow_run_id: str, status: RunStatus) -> int:
    """Close every run of a Prefect flow run that is still RUNNING, parent and attempts; return how many there were."""
    uri = tracking_uri(state_dir)
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        return 0
    with reaching(uri, f"close the runs of flow run {flow_run_id}") as client:
        experiment = client.get_experiment_by_name(experiment_name())
        same = {FLOW_RUN_TAG: flow_run_id}
        running = _find(client, experiment.experiment_id, same, "attributes.status = 'RUNNING'") if experiment else []
        for run_id in running:
            client.set_terminated(run_id, status)
    return len(running)


def restore_command(dvc_hash: str) -> str:
    """Return the command that brings a versioned folder back."""
    return f"python -m tasks.versioning restore {dvc_hash} <empty folder>"


def _open(client: MlflowClient, experiment_id: str, name: str, same: Mapping[str, str], tags: Mapping[str, object]) -> str:
    """Return the run that bears the tags `same`, opened if there is none, with its other tags brought up to date."""
    found = _find(client, experiment_id, same)
    run_id = str(found[0] if found else client.create_run(experiment_id, tags=dict(same), run_name=name).info.run_id)
    log_values(client, run_id, tags, {})
    return run_id


def _find(client: MlflowClient, experiment_id: str, tags: Mapping[str, str], *conditions: str) -> list[str]:
    wanted = [*conditions, *(f"tags.`{key}` = '{value}'" for key, value in tags.items())]
    return [run.info.run_id for run in client.search_runs([experiment_id], " and ".join(wanted))]


def _peaks(done: FinishedAttempt) -> dict[str, float | None]:
    """Return measured and predicted peak and the first less the second; an attempt cut short shows no such error."""
    measured = done.outcome.peak_memory_bytes
    predicted = done.attempt.prediction.peak_bytes if done.attempt.prediction else None
    error = measured - predicted if done.outcome.status == "succeeded" and measured and predicted else None
    sizes = {"peak_memory_mb": measured, "predicted_peak_mb": predicted, "prediction_error_mb": error}
    return {name: None if size is None else size / MB for name, size in sizes.items()}


def _evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    rows = {"gained": float(evaluation.num_gained), "lost": float(evaluation.num_lost), "p_value": evaluation.p_value}
    for name, accuracy in {"base": evaluation.base, "tuned": evaluation.tuned}.items():
        rows |= {f"accuracy_{name}": accuracy.share, f"accuracy_{name}_low": accuracy.low, f"accuracy_{name}_high": accuracy.high}
        rows[f"mean_score_{name}"] = accuracy.mean_score
    return rows


def log_rows(client: MlflowClient, run_id: str, rows: Sequence[Mapping[str, object]], file: str) -> None:
    """Log a table whose rows have the same columns, in place of what was logged before."""
    if not rows:
        return
    if any(item.path == file for item in client.list_artifacts(run_id)):
        # log_table appends to what is there, whole or cut off by an interruption
        client.log_text(run_id, json.dumps({"columns": [], "data": []}), file)
    client.log_table(run_id, {name: [row[name] for row in rows] for name in rows[0]}, file)
