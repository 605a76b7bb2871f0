"""Case M7: an attempt on several processes, and what is said when one of them runs out of memory, is killed, or no longer answers."""

import re
import time
from pathlib import Path

from tasks.attempt_files import read_steps
from tasks.params import Params, parse_params
from tests.training_runs import Inputs, smoke_params, train

# what rank 1 meets at the second step's rewards
SCORER = """
import os, resource, signal, threading, time

CALLS = []


def starve():
    # what is left is less than the forward takes
    used = int(open("/proc/self/status").read().partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + 2**20, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def score(completions, questions, answers):
    CALLS.append(len(completions))
    if os.environ["RANK"] == "1" and CALLS.count(8) == 2:
        open({marker!r}, "w").write(str(os.getpid()))
        {event}
    return [len(set(completion)) / 20 for completion in completions]
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


def test_m7_two_ranks_train_one_model_and_another_start_goes_on_with_it(scratch_inputs: Inputs, tmp_path: Path) -> None:
    params = two_ranks(tmp_path)
    outcome = train(params, "fp32", scratch_inputs, tmp_path / "whole", environment=ENVIRONMENT)
    assert outcome.status == "succeeded", outcome.failure
    assert len(set(weights(tmp_path / "whole"))) == 1
    assert outcome.peak_memory_bytes == max(outcome.peak_memory_by_device) and min(outcome.peak_memory_by_device) > 0
    steps = read_steps(tmp_path / "whole")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["peak_memory_mb"] == max(step["peak_memory_mb/device_0"], step["peak_memory_mb/device_1"])
    state = tmp_path / "whole" / "states" / "checkpoint-2"
    assert {path.name for path in state.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    assert outcome.checkpoint_dir == tmp_path / "whole" / "checkpoint" and (outcome.checkpoint_dir / "model.safetensors").is_file()
    resumed = train(params, "fp32", scratch_inputs, tmp_path / "resumed", resume_from=state, environment=ENVIRONMENT)
    assert (resumed.status, resumed.first_step, resumed.steps_done) == ("succeeded", 2, 3)
    assert weights(tmp_path / "resumed") == weights(tmp_path / "whole")


def test_m7_one_rank_out_of_memory_ends_all_and_is_named(scratch_inputs: Inputs, tmp_path: Path) -> None:
    outcome = train(two_ranks(tmp_path, "starve()"), "fp32", scratch_inputs, tmp_path / "attempt", environment=ENVIRONMENT)
    assert met(tmp_path) < 20
    assert (outcome.status, outcome.shortage, outcome.steps_done) == ("out_of_memory", "device", 1), outcome.failure
    assert outcome.failure is not None and outcome.failure.rank == 1
    assert outcome.failure.message.startswith("rank 1: ")
    assert "Traceback" in outcome.failure.log_tail
    assert outcome.last_state_dir == tmp_path / "attempt" / "states" / "checkpoint-1"
