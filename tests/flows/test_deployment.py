"""The deployments of prefect.yaml on a real server and worker, as a schedule would run them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.files import read_record
from tasks.program_request import REQUEST_FILE, EvaluationBatch
from tasks.records import RunRecord
from tests.flow_runs import ROOT

PARAMETERS = ("-p", "params=params/smoke.yaml", "-p", "max_steps=2", "-p", "precision=bf16")


def prefect(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
        cwd=ROOT,
        env={**environment, "PWD": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


@pytest.fixture(scope="module")
def worker(flow_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    assert prefect(flow_environment, "work-pool", "create", "local-process", "--type", "process").returncode == 0
    deployed = prefect(flow_environment, "deploy", "--all")
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    log_path = tmp_path_factory.mktemp("worker") / "worker.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", "local-process"],
            cwd=ROOT,
            env=flow_environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield flow_environment
    finally:
        process.terminate()
        process.wait(300)


def test_deployment_trains_again_on_the_same_inputs_and_leaves_the_tree_clean(worker: dict[str, str]) -> None:
    runs = Path(worker["HALFSTEP_HOME"]) / "runs"
    before, tree = set(runs.glob("*/run.json")), git_status()
    shown = ""
    for _ in range(2):
        done = prefect(worker, "deployment", "run", "retrain/on-demand", *PARAMETERS, "--watch")
        assert done.returncode == 0, done.stdout + done.stderr
        shown = done.stdout + done.stderr
    new = sorted(set(runs.glob("*/run.json")) - before)
    first, second = (read_record(path, RunRecord) for path in new)
    assert [record.attempts[0].outcome.steps_done for record in (first, second)] == [2, 2]
    assert first.dataset == second.dataset
    assert first.base_model == second.base_model
    asked = read_record(new[1].parent / "evaluation" / REQUEST_FILE, EvaluationBatch).requests
    assert [request.out_file.name for request in asked] == ["tuned.json"], "the base model was evaluated again"
    assert not (new[1].parent / "datasets").exists(), f"the dataset was built again: {shown}"
    assert not (ROOT / "runs" / new[0].parent.name).exists()
    assert git_status() == tree


def git_status() -> str:
    return subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("parameter", "named"), [("max_stepz=3", "max_stepz"), ("precision=int8", "precision"), ("max_steps=many", "max_steps")]
)
def test_bad_parameters_are_refused_before_a_run_exists(worker: dict[str, str], parameter: str, named: str) -> None:
    refused = prefect(worker, "deployment", "run", "retrain/nightly", "-p", parameter)
    assert refused.returncode != 0
    assert named in refused.stdout + refused.stderr
    assert "Created flow run" not in refused.stdout
