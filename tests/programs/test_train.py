"""The training program alone: what ran is what was planned, it learns, it resumes, and it stands without its orchestrators."""

from pathlib import Path

import pytest
from scipy.stats import mannwhitneyu

from tasks.attempt_files import read_steps
from tasks.engines.trl_local import GLIBC_ALLOCATOR
from tasks.memory import MB
from tasks.params import Params, parse_params
from tasks.programs.device_memory import LinuxCpuMemory
from tasks.records import MemoryLevers
from tests.programs.in_process import DEVICE, train_here
from tests.training_runs import Inputs, smoke_params, train

# as on a machine where they are not installed: the path finder does not find them
BLOCKER = """
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {"prefect", "mlflow", "dvc"} else find(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
"""


# autocast that does nothing, as accelerate leaves it out for fp16 on a CPU
NO_AUTOCAST = """
import torch
begin = torch.amp.autocast_mode.autocast.__init__
def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
    begin(self, device_type, dtype=dtype, enabled=False, cache_enabled=cache_enabled)
torch.amp.autocast_mode.autocast.__init__ = __init__
"""


def test_fp32_runs_in_fp32_and_learns(scratch_inputs: Inputs, tmp_path: Path) -> None:
    outcome = train(smoke_params(max_steps=30, gradient_accumulation_steps=2), "fp32", scratch_inputs, tmp_path)
    assert outcome.status == "succeeded", outcome.failure
    assert outcome.observed is not None
    assert outcome.observed.forward == outcome.observed.backward == outcome.observed.rollout == ("float32",)
    steps = read_steps(tmp_path)
    assert all(step["grad_norm"] > 0 for step in steps)
    rewards = [step["reward"] for step in steps]
    assert mannwhitneyu(rewards[-8:], rewards[:8], alternative="greater").pvalue < 0.01


def test_runs_where_prefect_mlflow_and_dvc_are_not_installed(scratch_inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    outcome = train(smoke_params(), "bf16", scratch_inputs, tmp_path / "attempt", environment={"PYTHONPATH": str(tmp_path)})
    assert outcome.status == "succeeded", outcome.failure


@pytest.mark.skipif(DEVICE != "cpu", reason="the meter is a CPU's")
def test_a_shortage_is_told_though_nothing_is_left_to_ask_what_is_left(
    scratch_inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_for_too_much(*_: object, **__: object) -> None:
        bytearray(2**62)

    monkeypatch.setattr(LinuxCpuMemory, "available_bytes", ask_for_too_much)
    outcome, _ = train_here(
        smoke_params(), "fp32", scratch_inputs, tmp_path, tweak=lambda trainer: setattr(trainer, "compute_loss", ask_for_too_much)
    )
    assert (outcome.status, outcome.shortage) == ("out_of_memory", "device"), outcome.failure
    assert outcome.failure is not None and (outcome.failure.error_type, outcome.failure.available_bytes) == ("MemoryError", None)


@pytest.mark.parametrize("label", ["bf16", "fp16"])
def test_without_autocast_the_attempt_does_not_count(label: str, scratch_inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_AUTOCAST)
    outcome = train(smoke_params(), label, scratch_inputs, tmp_path / "attempt", environment={"PYTHONPATH": str(tmp_path)})
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert outcome.failure.error_type == "PrecisionMismatch"
    assert "forward ran in float32" in outcome.failure.message
    # noticed after the first step, not at the end of a long run
    assert outcome.failure.phase == "optimizer" and read_steps(tmp_path / "attempt") == []


def test_an_unchanging_reward_is_no_success(scratch_inputs: Inputs, tmp_path: Path) -> None:
    scorer = tmp_path / "constant.py"
    scorer.write_text("def score(completions, questions, answers):\n    return [0.5] * len(completions)\n")
    params = parse_params({**smoke_params().model_dump(mode="json"), "reward": {"scorer": f"{scorer}:score"}}, "constant")
    outcome = train(params, "fp32", scratch_inputs, tmp_path / "attempt")
    assert outcome.status == "diverged"
    assert outcome.failure is not None
    assert "in no step did the completions of a group differ in reward" in outcome.failure.message


def test_the_last_two_training_states_are_kept(scratch_inputs: Inputs, tmp_path: Path) -> None:
    outcome = train(smoke_params(max_steps=5, save_steps=1), "fp32", scratch_inputs, tmp_path)
    assert sorted(path.name for path in (tmp_path / "states").iterdir() if not path.name.startswith(".")) == [
        "checkpoint-4",
        "checkpoint-5",
    ]
    assert outcome.last_state_dir == tmp_path / "states" / "checkpoint-5"


def levers(micro_batch: int, accumulation: int, *, checkpointing: bool = False, rollout: int | None = None) -> MemoryLevers:
    return MemoryLevers(
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=checkpointing,
        rollout_batch_size=rollout,
    )


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        ("micro-batch", levers(64, 1), levers(32, 2)),
        ("gradient checkpointing", levers(64, 1), levers(64, 1, checkpointing=True)),
    ],
)
def test_each_lever_lowers_the_peak_of_training(
    case: str, before: MemoryLevers, after: MemoryLevers, deep_inputs: Inputs, tmp_path: Path
) -> None:
    params = smoke_params(max_steps=1, per_device_train_batch_size=64, max_completion_length=32)
    peaks = [_peak_mb(params, lever, deep_inputs, tmp_path / str(index)) for index, lever in enumerate((before, after))]
    assert peaks[1] < 0.8 * peaks[0], (case, peaks)


def test_a_smaller_rollout_chunk_lowers_the_peak_of_the_rollout(deep_inputs: Inputs, tmp_path: Path) -> None:
    params = smoke_params(max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=48, max_completion_length=96)
    # small micro-batches, so that the rollout has the peak; fp32, because a CPU without 16-bit units widens weights and cache;
    # a compact allocator, because what glibc's own heap keeps differs from run to run by as much as a chunk frees here
    chunks = [levers(2, 48, checkpointing=True, rollout=chunk) for chunk in (None, 24)]
    peaks = [_peak_mb(params, lever, deep_inputs, tmp_path / str(index), "fp32", compact=True) for index, lever in enumerate(chunks)]
    assert peaks[1] < 0.8 * peaks[0], peaks


def _peak_mb(
    params: Params, lever: MemoryLevers, inputs: Inputs, attempt_dir: Path, label: str = "bf16", *, compact: bool = False
) -> float:
    outcome = train(params, label, inputs, attempt_dir, levers=lever, environment=GLIBC_ALLOCATOR if compact else None)
    assert outcome.status == "succeeded", outcome.failure
    assert outcome.peak_memory_bytes is not None
    return outcome.peak_memory_bytes / MB
