"""MLflow being away loses nothing of an attempt: it is delivered when the run concludes, once."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.attempt_files import METRICS_FILE, read_steps
from tasks.attempt_log import AttemptLog, deliver
from tasks.params import Params
from tasks.precision import plan_precision
from tasks.records import Attempt, FinishedAttempt, Outcome, RunFolder, SourceVersion, TrackedRun
from tasks.tracking.runs import open_parent_run
from tests.machines import hardware_of

AWAY = TrackedRun(tracking_uri="http://127.0.0.1:1", experiment_id="0", run_id="0")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> TrackedRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
        hardware = hardware_of("cpu_epyc_9r14")
        source = SourceVersion(git_commit=None, dirty=None)
        folder = RunFolder(name="log", run_dir=Path("unused"), started_at="now", flow_run_id=None, source=source)
        plan = plan_precision(hardware, Params())
        return open_parent_run(folder, tmp_path_factory.mktemp("state"), Params(), hardware, plan)


def attempt() -> Attempt:
    return plan_precision(hardware_of("cpu_epyc_9r14"), Params()).attempts[0]


def test_a_damaged_line_among_the_steps_costs_that_line_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_steps(tmp_path, 3)
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    for damaged in ("", '{"step": 2, "ti', "[]", '{"step": 2}', '{"step": 2, "time": 1.0, "metrics": 3}'):
        caplog.clear()
        (tmp_path / METRICS_FILE).write_text("".join(f"{line}\n" for line in (lines[0], damaged, lines[2])))
        assert [step["step"] for step in read_steps(tmp_path)] == [1, 3]
        assert "a line that is no step is left out" in caplog.text


def write_steps(folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "time": 1.0 + step, "metrics": {"reward": 0.1 * step}}) for step in range(1, count + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_an_attempt_that_could_not_be_opened_is_delivered_later_and_once(parent: TrackedRun, tmp_path: Path) -> None:
    said: list[str] = []
    log = AttemptLog(AWAY, attempt(), tmp_path, said.append)
    write_steps(tmp_path, 5)
    log.send()
    done = FinishedAttempt(attempt=attempt(), outcome=Outcome(status="succeeded", steps_done=5), attempt_dir=tmp_path)
    log.close(done.outcome, patience_seconds=0.0)
    assert len(said) == 1
    assert "it is logged when the run concludes" in said[0]
    for _ in range(2):
        deliver(parent, done, said.append)
    client = MlflowClient(parent.tracking_uri)
    runs = client.search_runs([parent.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.run_id}'")
    assert [run.info.status for run in runs] == ["FINISHED"]
    points = client.get_metric_history(runs[0].info.run_id, "reward")
    assert sorted(point.step for point in points) == [1, 2, 3, 4, 5]


def test_a_cut_off_attempt_is_closed_as_killed(parent: TrackedRun, tmp_path: Path) -> None:
    resumed = attempt().model_copy(update={"resumption": 1})
    AttemptLog(parent, resumed, tmp_path, print)
    write_steps(tmp_path, 2)
    outcome = Outcome(status="cancelled", steps_done=2)
    deliver(parent, FinishedAttempt(attempt=resumed, outcome=outcome, attempt_dir=tmp_path), print)
    client = MlflowClient(parent.tracking_uri)
    runs = client.search_runs([parent.experiment_id], "attributes.run_name = '1-baseline-bf16-resumed-1'")
    assert [run.info.status for run in runs] == ["KILLED"]
