"""Ctrl-C in the middle of training, and going on from what was kept."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.flow_runs import ROOT, FlowRun, processes_naming, run_flow

ARGUMENTS = ("--params", "params/smoke.yaml", "precision.mode=bf16", "training.save_steps=2", "training.max_steps=8")


@pytest.fixture(scope="module")
def stopped_run(flow_environment: dict[str, str]) -> FlowRun:
    # without a server of the session, as a person has it: Prefect starts a temporary one in the flow's group
    environment = {key: value for key, value in flow_environment.items() if key != "PREFECT_API_URL"}
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.retrain", *ARGUMENTS],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    home = Path(flow_environment["HALFSTEP_HOME"])
    before = set(home.glob("runs/*/1-baseline-bf16/states/checkpoint-2"))
    deadline = time.monotonic() + 900
    while set(home.glob("runs/*/1-baseline-bf16/states/checkpoint-2")) <= before and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    stdout, stderr = process.communicate(timeout=300)
    return FlowRun(process.returncode, stdout, stderr, home)


def test_stop_keeps_a_training_state_and_says_how_to_go_on(stopped_run: FlowRun) -> None:
    assert stopped_run.returncode == 130, stopped_run.stderr[-3000:]
    assert f"--resume {stopped_run.run_dir.name}" in stopped_run.stderr
    assert "kept the training state of step" in stopped_run.stderr
    assert "Traceback" not in stopped_run.stderr
    assert processes_naming(str(stopped_run.run_dir)) == []


def test_stopped_runs_are_killed_in_mlflow(stopped_run: FlowRun) -> None:
    experiment = stopped_run.client.get_experiment_by_name("halfstep")
    assert experiment is not None
    runs = stopped_run.client.search_runs([experiment.experiment_id], "attributes.status = 'RUNNING'")
    assert runs == []
    killed = stopped_run.client.search_runs([experiment.experiment_id], "attributes.status = 'KILLED'")
    assert {"1-baseline-bf16", stopped_run.run_dir.name} <= {run.info.run_name for run in killed}


def test_resume_goes_on_from_the_kept_state(stopped_run: FlowRun, flow_environment: dict[str, str]) -> None:
    resumed = run_flow(flow_environment, "--resume", stopped_run.run_dir.name)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    first, second = resumed.record.attempts
    assert first.outcome.status == "cancelled"
    assert second.attempt.name == "1-baseline-bf16-resumed-1"
    assert second.outcome.first_step == int(str(second.attempt.resume_from).rpartition("-")[2]) >= 2
    assert second.outcome.steps_done == 8
    assert resumed.record.status == "succeeded"
    refused = run_flow(flow_environment, "--resume", stopped_run.run_dir.name)
    assert refused.returncode == 2
    assert "that run succeeded" in refused.stderr
