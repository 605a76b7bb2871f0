"""Case M7: an attempt on several processes, and what is said when one of them runs out of memory, is killed, or no longer answers."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.attempt_files import read_steps
from tasks.files import read_record
from tasks.params import Params, parse_params
from tasks.places import PROJECT_DIR
from tasks.programs.ranks import Ranks
from tasks.records import Outcome
from tests.training_runs import Inputs, smoke_params, train, write_job

# what rank 1 meets at the second step's rewards: the rehearsal is of 8 answers too
SCORER = """
import os, resource, signal, time

CALLS = []


def starve():
    # what is left is less than the forward takes
    used = int(open("/proc/self/status").read().partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + 2**20, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def score(completions, questions, answers):
    CALLS.append(len(completions))
    if os.environ["RANK"] == "1" and CALLS.count(8) == 3:
        open({marker!r}, "w").write(str(os.getpid()))
        {event}
    return [len(set(completion)) / 20 for completion in completions]
"""
SHORT_TIMEOUT = """
from datetime import timedelta
from tasks.programs import process_group
process_group.COLLECTIVE_TIMEOUT = timedelta(seconds=30)
"""
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


def two_ranks(folder: Path, event: str = "pass", **training: object) -> Params:
    """Return params of a run on two ranks whose scorer does `event` in rank 1."""
    scorer = folder / "scorer.py"
    scorer.write_text(SCORER.format(event=event, marker=str(folder / "met")))
    fields = {"strategy": "ddp", "num_processes": 2, "per_device_train_batch_size": 8, "max_steps": 3, "save_steps": 1, **training}
    tree = smoke_params(**fields).model_dump(mode="json")
    return parse_params({**tree, "reward": {"scorer": f"{scorer}:score"}}, "two_ranks")


def weights(attempt_dir: Path) -> list[str]:
    """Return the digest of the weights that each rank ended with."""
    logs = [attempt_dir / "train.log", attempt_dir / "ranks" / "1" / "train.log"]
    return [re.findall(r"weights at the end: ([0-9a-f]{64})", log.read_text())[-1] for log in logs]


def met(folder: Path) -> float:
    """Return how long ago the event was, in seconds."""
    return time.time() - (folder / "met").stat().st_mtime


@pytest.fixture(scope="module")
def whole(scratch_inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Params, Outcome, Path]:
    """A run of three steps on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    params = two_ranks(folder)
    return params, train(params, "fp32", scratch_inputs, folder / "attempt", environment=ENVIRONMENT), folder / "attempt"


def test_m7_two_ranks_train_one_model(whole: tuple[Params, Outcome, Path]) -> None:
    _, outcome, attempt_dir = whole
    assert outcome.status == "succeeded", outcome.failure
    assert len(set(weights(attempt_dir))) == 1
    assert outcome.peak_memory_bytes == max(outcome.peak_memory_by_device) and min(outcome.peak_memory_by_device) > 0
    steps = read_steps(attempt_dir)
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["peak_memory_mb"] == max(step["peak_memory_mb/device_0"], step["peak_memory_mb/device_1"])
        assert step["mismatch_max"] < 1e-5
    assert sorted(path.name for path in (attempt_dir / "states" / "checkpoint-2").glob("rng_state*")) == [
        "rng_state_0.pth",
        "rng_state_1.pth",
    ]
    assert outcome.checkpoint_dir == attempt_dir / "checkpoint" and (attempt_dir / "checkpoint" / "model.safetensors").is_file()


@pytest.mark.parametrize(("visible", "each"), [("", ["", ""]), ("5", ["5", "5"]), ("5,7", ["5", "7"]), (None, ["0", "1"])])
def test_a_rank_sees_one_of_the_visible_devices_or_none(
    visible: str | None, each: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(Ranks, "_start", lambda ranks, rank, environment: seen.append(environment["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    Ranks(write_job(two_ranks(tmp_path), "fp32", Inputs(tmp_path, tmp_path), tmp_path / "attempt"), 2).start()
    assert seen == each


@pytest.mark.slow
def test_m7_a_resumed_run_on_two_ranks_is_the_straight_run(
    whole: tuple[Params, Outcome, Path], scratch_inputs: Inputs, tmp_path: Path
) -> None:
    params, _, attempt_dir = whole
    state = attempt_dir / "states" / "checkpoint-2"
    resumed = train(params, "fp32", scratch_inputs, tmp_path, resume_from=state, environment=ENVIRONMENT)
    assert (resumed.status, resumed.first_step, resumed.steps_done) == ("succeeded", 2, 3), resumed.failure
    assert weights(tmp_path) == weights(attempt_dir)


def test_m7_one_rank_out_of_memory_ends_all_and_is_named(scratch_inputs: Inputs, tmp_path: Path) -> None:
    outcome = train(two_ranks(tmp_path, "starve()"), "fp32", scratch_inputs, tmp_path / "attempt", environment=ENVIRONMENT)
    assert met(tmp_path) < 20
    assert (outcome.status, outcome.shortage, outcome.steps_done) == ("out_of_memory", "device", 1), outcome.failure
    assert outcome.failure is not None and outcome.failure.rank == 1
    assert outcome.failure.message.startswith("rank 1: ")
    # rank 1's log, though rank 0's is the one that is read
    assert "the log of rank 1 ends so:" in (tmp_path / "attempt" / "train.log").read_text()
    assert outcome.failure.log_tail.endswith("(Cannot allocate memory)")
    assert outcome.last_state_dir == tmp_path / "attempt" / "states" / "checkpoint-1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "error_type", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "ProcessDied", "rank 1 ended by signal 9 without an outcome"),
        ("os._exit(0)", "ProcessDied", "rank 1 ended by exit code 0 without an outcome"),
        ("raise ValueError('CUDA out of memory')", "ScorerFailed", "rank 1: "),
    ],
)
def test_m7_a_rank_that_dies_ends_all_and_is_named(event: str, error_type: str, words: str, scratch_inputs: Inputs, tmp_path: Path) -> None:
    outcome = train(two_ranks(tmp_path, event), "fp32", scratch_inputs, tmp_path / "attempt", environment=ENVIRONMENT)
    assert met(tmp_path) < 20
    assert (outcome.status, outcome.steps_done) == ("failed", 1)
    assert outcome.failure is not None and (outcome.failure.rank, outcome.failure.error_type) == (1, error_type)
    assert outcome.failure.phase == "rollout"
    assert words in outcome.failure.message


@pytest.mark.slow
def test_m7_a_rank_that_no_longer_answers_is_named(scratch_inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SHORT_TIMEOUT)
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PROJECT_DIR}"}
    outcome = train(two_ranks(tmp_path, "time.sleep(600)"), "fp32", scratch_inputs, tmp_path / "attempt", environment=environment)
    assert met(tmp_path) < 30 + 20
    assert outcome.status == "failed" and outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.error_type) == (1, "RankSilent")
    assert "rank 1 did not answer" in outcome.failure.message


@pytest.mark.slow
def test_m7_a_stop_ends_every_rank_one_that_waits_in_a_collective_too(scratch_inputs: Inputs, tmp_path: Path) -> None:
    stopped: list[float] = []

    def stop_when_met(launcher: int) -> None:
        if (tmp_path / "met").is_file() and not stopped:
            stopped.append(time.monotonic())
            os.kill(launcher, signal.SIGTERM)

    job = write_job(two_ranks(tmp_path, "time.sleep(600)"), "fp32", scratch_inputs, tmp_path / "attempt")
    environment = {**os.environ, **ENVIRONMENT}
    launcher = subprocess.Popen([sys.executable, "-m", "tasks.programs.ranks", str(job.attempt_dir)], cwd=PROJECT_DIR, env=environment)
    try:
        while launcher.poll() is None:
            stop_when_met(launcher.pid)
            time.sleep(0.1)
    finally:
        launcher.kill()
    assert launcher.returncode == 143
    assert time.monotonic() - stopped[0] < 60
    outcome = read_record(job.attempt_dir / "outcome.json", Outcome)
    assert (outcome.status, outcome.steps_done, outcome.failure) == ("cancelled", 1, None)
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert str(job.attempt_dir).encode() not in command.read_bytes()
