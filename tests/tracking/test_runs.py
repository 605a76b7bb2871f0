"""Parent and attempts in a real sqlite store: what was asked, decided and measured can be read back."""

import json
import math
import time
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from tasks.errors import HalfstepError, RefusedInput
from tasks.memory import MB
from tasks.params import Params
from tasks.progress import joined_steps
from tasks.records import (
    Accuracy,
    ArtifactVersion,
    DatasetVersion,
    Evaluation,
    Failure,
    FinishedAttempt,
    Hardware,
    LeverEffect,
    MemoryPrediction,
    ObservedPrecision,
    Outcome,
    PrecisionPlan,
    RunRecord,
    SampledCompletion,
    TrackedRun,
)
from tasks.tracking.location import open_experiment, tracking_uri
from tasks.tracking.runs import (
    close_attempt_run,
    close_open_runs,
    close_parent_run,
    log_dataset,
    log_rows,
    open_attempt_run,
    open_parent_run,
)
from tests.tracking.conftest import run_folder

HASH = "0123456789abcdef0123456789abcdef.dir"
VERSION = ArtifactVersion(path=Path("x"), dvc_hash=HASH, size_bytes=3 << 20, location="store:checkpoints/x.dvc")
SHORTAGE = Outcome(
    status="out_of_memory",
    shortage="device",
    peak_memory_bytes=900 << 20,
    failure=Failure(phase="backward", error_type="RuntimeError", message="can't allocate memory"),
)
SUCCESS = Outcome(
    status="succeeded",
    observed=ObservedPrecision(
        forward=("float16",), backward=("float16",), rollout=("float16", "float32"), trainable_weights=("float32",), scaler_live=True
    ),
    final_loss_scale=1024.0,
    skipped_steps=1,
    peak_memory_bytes=700 << 20,
    steps_done=3,
    total_steps=3,
    step_time_ms=12.5,
    tokens_per_second=99.0,
)


def client_of(run: TrackedRun) -> MlflowClient:
    return MlflowClient(run.tracking_uri)


def artifact(run: TrackedRun, name: str, tmp_path: Path) -> str:
    return Path(client_of(run).download_artifacts(run.run_id, name, str(tmp_path))).read_text()


def write_steps(attempt_dir: Path, rewards: dict[int, float]) -> Path:
    attempt_dir.mkdir(parents=True)
    lines = [json.dumps({"step": step, "time": 1000.0 + step, "metrics": {"reward": reward}}) for step, reward in rewards.items()]
    (attempt_dir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (attempt_dir / "train.log").write_text("the log")
    return attempt_dir


def test_parent_run_holds_what_was_asked_found_and_decided(
    parent: TrackedRun, state_dir: Path, plan: PrecisionPlan, hardware: Hardware, tmp_path: Path
) -> None:
    run = client_of(parent).get_run(parent.run_id)
    assert run.info.artifact_uri.startswith(f"{state_dir.as_uri()}/mlartifacts/")
    assert parent.tracking_uri == f"sqlite:///{state_dir}/mlflow.db"
    assert run.data.params["training.learning_rate"] == "2e-05"
    assert "'precision': 'fp16'" in run.data.params["memory.retries"]
    assert run.data.params["training.engine_args.many.119"] == "119"
    assert run.data.params["training.engine_args.odd_key"] == "[]"
    assert run.data.params["training.engine_args.note"] == "x" * 6000
    assert run.data.tags["halfstep.run_name"] == run.info.run_name
    assert (run.data.tags["git.commit"], run.data.tags["git.dirty"]) == ("abc123", "True")
    assert run.data.tags["plan.attempts"] == "1-baseline-bf16, 2-retry-fp16"
    assert len(run.data.tags["plan.reason"]) == 8000
    assert run.data.tags["hardware.bf16"] == "native: has avx512_bf16"
    assert PrecisionPlan.model_validate_json(artifact(parent, "plan.json", tmp_path)) == plan
    assert Hardware.model_validate_json(artifact(parent, "hardware.json", tmp_path)) == hardware
    assert len(yaml.safe_load(artifact(parent, "params.yaml", tmp_path))["training"]["engine_args"]["note"]) == 7000


def test_a_repeated_open_goes_on_with_the_same_run(parent: TrackedRun, state_dir: Path, plan: PrecisionPlan, hardware: Hardware) -> None:
    folder = run_folder("test_a_repeated_open_goes_on_with_the_same_run", "another flow run")
    attempt = open_attempt_run(parent, plan.attempts[0])
    client_of(parent).set_terminated(attempt.run_id, "KILLED")
    assert open_attempt_run(parent, plan.attempts[0]) == attempt
    assert client_of(parent).get_run(attempt.run_id).info.status == "KILLED"
    assert open_parent_run(folder, state_dir, Params(), hardware, plan) == parent
    assert client_of(parent).get_run(parent.run_id).data.tags["prefect.flow_run_id"] == "another flow run"
    later = folder.model_copy(update={"started_at": "later"})
    assert open_parent_run(later, state_dir, Params(), hardware, plan) != parent


def test_what_a_resume_set_otherwise_is_a_tag_beside_the_params_of_the_first_start(
    parent: TrackedRun, state_dir: Path, plan: PrecisionPlan, hardware: Hardware, tmp_path: Path
) -> None:
    name = "test_what_a_resume_set_otherwise_is_a_tag_beside_the_params_of_the_first_start"
    folder = run_folder(name, "f").model_copy(update={"changes": ("memory.budget_mb None -> 900.0", "memory.preflight skip -> warn")})
    params = Params.model_validate({"memory": {"budget_mb": 900, "preflight": "warn"}})
    assert open_parent_run(folder, state_dir, params, hardware, plan) == parent
    run = client_of(parent).get_run(parent.run_id)
    assert run.data.params["memory.budget_mb"] == "None"
    assert run.data.tags["params.set_on_resume"] == "memory.budget_mb None -> 900.0; memory.preflight skip -> warn"
    assert yaml.safe_load(artifact(parent, "params.yaml", tmp_path))["memory"]["budget_mb"] == 900


def test_each_attempt_is_a_child_run_with_its_outcome(parent: TrackedRun, plan: PrecisionPlan, tmp_path: Path) -> None:
    first, second = (open_attempt_run(parent, attempt) for attempt in plan.attempts)
    for run, attempt, outcome in zip((first, second), plan.attempts, (SHORTAGE, SUCCESS), strict=True):
        close_attempt_run(run, FinishedAttempt(attempt=attempt, outcome=outcome, attempt_dir=write_steps(tmp_path / attempt.name, {})))
    failed, done = (client_of(parent).get_run(run.run_id) for run in (first, second))
    assert [run.info.run_name for run in (failed, done)] == ["1-baseline-bf16", "2-retry-fp16"]
    assert {run.data.tags["mlflow.parentRunId"] for run in (failed, done)} == {parent.run_id}
    assert (failed.info.status, done.info.status) == ("FAILED", "FINISHED")
    assert {key: failed.data.tags[f"outcome.{key}"] for key in ("status", "shortage", "phase")} == {
        "status": "out_of_memory",
        "shortage": "device",
        "phase": "backward",
    }
    assert failed.data.metrics["peak_memory_mb"] == 900
    assert done.data.params["precision"] == "fp16" and done.data.params["precision.grad_scaler"] == "True"
    assert done.data.params["levers.gradient_checkpointing"] == "True" and done.data.params["rehearsal"] == "True"
    assert done.data.tags["attempt.reason"] == "fp16 because of a fact"
    assert (done.data.tags["observed.forward"], done.data.tags["observed.rollout"]) == ("float16", "float16, float32")
    assert (done.data.metrics["final_loss_scale"], done.data.metrics["skipped_steps"], done.data.metrics["steps_done"]) == (1024, 1, 3)
    assert Outcome.model_validate_json(artifact(second, "outcome.json", tmp_path)) == SUCCESS
    assert artifact(second, "train.log", tmp_path) == "the log"


def test_predicted_and_measured_peak_are_one_metric_and_each_change_is_told_by_category(
    parent: TrackedRun, plan: PrecisionPlan, tmp_path: Path
) -> None:
    categories = {"weights": 500 * MB, "logits": 150 * MB}
    peak = MemoryPrediction(
        peak_bytes=650 * MB, least_bytes=0, most_bytes=0, phase="forward", categories=categories, phases={}, available_bytes=800 * MB
    )
    steps = (("precision", "bf16 -> fp16", {"runtime": 40 * MB}), ("micro-batch", "8 -> 4", {"logits": 90 * MB, "gradients": -4 * MB}))
    effects = tuple(LeverEffect(lever=lever, change=text, peak_bytes=0, freed=freed) for lever, text, freed in steps)
    metrics = []
    for attempt, outcome in zip(plan.attempts, (SHORTAGE, SUCCESS), strict=True):
        attempt = attempt.model_copy(update={"prediction": peak, "effects": effects})
        run = open_attempt_run(parent, attempt)
        close_attempt_run(run, FinishedAttempt(attempt=attempt, outcome=outcome, attempt_dir=tmp_path))
        metrics.append(client_of(parent).get_run(run.run_id).data.metrics)
    short, done = metrics
    # what ran short may not have come to its peak
    assert (short["predicted_peak_mb"], short["peak_memory_mb"], "prediction_error_mb" in short) == (650, 900, False)
    assert (done["predicted_peak_mb"], done["peak_memory_mb"], done["prediction_error_mb"]) == (650, 700, 50)
    assert {name: size for name, size in done.items() if name.startswith(("predicted_mb/", "freed_mb/"))} == {
        "predicted_mb/weights": 500,
        "predicted_mb/logits": 150,
        "freed_mb/precision": 40,
        "freed_mb/precision.runtime": 40,
        "freed_mb/micro-batch": 86,
        "freed_mb/micro-batch.logits": 90,
        "freed_mb/micro-batch.gradients": -4,
    }


def test_dataset_is_searchable_and_says_how_to_get_it_back(parent: TrackedRun) -> None:
    log_dataset(parent, DatasetVersion(version=VERSION, num_train=10, num_eval=2, num_dropped=1), "chain_sum")
    client = client_of(parent)
    found = client.search_runs([parent.experiment_id], f"dataset.digest = '{HASH[:8]}' and dataset.name = 'chain_sum'")
    assert parent.run_id in [run.info.run_id for run in found]
    (entry,) = client.get_run(parent.run_id).inputs.dataset_inputs
    assert json.loads(entry.dataset.source)["restore"].startswith(f"python -m tasks.versioning restore {HASH}")
    assert json.loads(entry.dataset.profile)["num_dropped"] == 1


def test_closed_parent_can_be_compared_by_its_headline_figures(
    parent: TrackedRun, plan: PrecisionPlan, hardware: Hardware, tmp_path: Path
) -> None:
    accuracy = Accuracy(num_correct=1, num_problems=4, share=0.25, low=0.1, high=0.5, mean_score=0.3)
    sample = SampledCompletion(prompt="1+1=", expected="2", before="3", after="2", score_before=0, score_after=1)
    evaluation = Evaluation(base=accuracy, tuned=accuracy, num_gained=2, num_lost=1, p_value=math.nan, samples=(sample,) * 2)
    finished = (
        FinishedAttempt(attempt=plan.attempts[0], outcome=SHORTAGE, attempt_dir=write_steps(tmp_path / "1", {1: 0.1, 2: 0.15, 3: 9.0})),
        FinishedAttempt(
            attempt=plan.attempts[1],
            outcome=SUCCESS.model_copy(update={"first_step": 2}),
            attempt_dir=write_steps(tmp_path / "2", {3: 0.2, 4: 0.4}),
        ),
    )
    record = RunRecord(
        run=run_folder("x", None),
        tracked=parent,
        status="succeeded",
        hardware=hardware,
        plan=plan,
        params={},
        dataset=DatasetVersion(version=VERSION, num_train=1, num_eval=1, num_dropped=0),
        base_model=VERSION,
        attempts=finished,
        evaluation=evaluation,
        checkpoint=VERSION,
    )
    # what an interrupted logging left is replaced
    log_rows(client_of(parent), parent.run_id, [{"prompt": "cut off"}], "samples.json")
    for _ in range(2):
        close_parent_run(record, joined_steps(finished), (tmp_path / "2" / "train.log",))
    run = client_of(parent).get_run(parent.run_id)
    wanted = {
        "accuracy_base": 0.25,
        "accuracy_tuned_low": 0.1,
        "gained": 2,
        "lost": 1,
        "reward_first": 0.1,
        "reward_last": 0.4,
        "peak_memory_mb": 700,
        "tokens_per_second": 99,
        "step_time_ms": 12.5,
        "p_value_nonfinite": 1,
    }
    assert {name: run.data.metrics[name] for name in wanted} == wanted
    assert "p_value" not in run.data.metrics
    assert run.info.status == "FINISHED"
    assert run.data.tags["precision.ran"] == "fp16"
    assert run.data.tags["checkpoint.dvc_hash"] == HASH
    assert len(json.loads(artifact(parent, "samples.json", tmp_path))["data"]) == 2
    assert json.loads(artifact(parent, "run.json", tmp_path))["run"]["name"] == "x"
    assert artifact(parent, "train.log", tmp_path) == "the log"


def test_runs_of_a_stopped_flow_are_closed(
    parent: TrackedRun, plan: PrecisionPlan, hardware: Hardware, state_dir: Path, tmp_path: Path
) -> None:
    child = open_attempt_run(parent, plan.attempts[0])
    done = open_attempt_run(parent, plan.attempts[1])
    close_attempt_run(done, FinishedAttempt(attempt=plan.attempts[1], outcome=SUCCESS, attempt_dir=write_steps(tmp_path / "2", {})))
    flow_run_id = "flow-test_runs_of_a_stopped_flow_are_closed"
    assert close_open_runs(state_dir, flow_run_id, "KILLED") == 2
    assert [client_of(parent).get_run(run.run_id).info.status for run in (parent, child, done)] == ["KILLED", "KILLED", "FINISHED"]
    assert close_open_runs(state_dir, flow_run_id, "KILLED") == 0
    folder = run_folder("test_runs_of_a_stopped_flow_are_closed", "a later flow run")
    assert open_parent_run(folder, state_dir, Params(), hardware, plan) == parent
    assert close_open_runs(state_dir, "a later flow run", "FAILED") == 1
    assert close_open_runs(tmp_path / "never used", flow_run_id, "KILLED") == 0
    assert not (tmp_path / "never used").exists()


def test_unreachable_server_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(HalfstepError, match=r"could not open experiment .*; start that server or correct MLFLOW_TRACKING_URI"):
        open_experiment(tmp_path)
    assert time.monotonic() - started < 30


def test_environment_names_place_and_experiment(
    tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch, parent: TrackedRun
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", parent.tracking_uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "my own")
    client, uri, experiment_id = open_experiment(tmp_path)
    assert (uri, client.get_experiment(experiment_id).name) == (parent.tracking_uri, "my own")
    assert open_experiment(tmp_path)[2] == experiment_id
    client.delete_experiment(experiment_id)
    with pytest.raises(HalfstepError, match="is deleted"):
        open_experiment(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    assert tracking_uri(Path("state")) == f"sqlite:///{Path.cwd()}/state/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:secret@host/db")
    with pytest.raises(RefusedInput, match="carries a user or password") as caught:
        close_open_runs(tmp_path, "a flow run", "KILLED")
    assert "secret" not in str(caught.value)
