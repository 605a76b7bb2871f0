"""Training-inference mismatch: the same tokens, weights and temperature, seen by the rollout and by training."""

import math
from pathlib import Path

import pytest
import torch

from tasks.attempt_files import read_steps
from tasks.programs.mismatch import MismatchMeter, SamplingRecorder
from tests.programs.in_process import params_with, train_here
from tests.training_runs import Inputs

pytestmark = pytest.mark.device


def worst(attempt_dir: Path, name: str) -> float:
    return max(step[name] for step in read_steps(attempt_dir))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_in_fp32_there_is_none(temperature: float, scratch_inputs: Inputs, tmp_path: Path) -> None:
    params = params_with(temperature=temperature, gradient_accumulation_steps=2, rollout_batch_size=8)
    outcome, _ = train_here(params, "fp32", scratch_inputs, tmp_path)
    assert outcome.status == "succeeded", outcome.failure
    for name in ("mismatch_kl", "mismatch_rms", "mismatch_max"):
        assert worst(tmp_path, name) < 1e-5


def test_fp16_is_nearer_than_bf16_and_an_fp32_head_helps(scratch_inputs: Inputs, tmp_path: Path) -> None:
    rms = {}
    for name, label, head in (("bf16", "bf16", False), ("bf16 + fp32 head", "bf16", True), ("fp16", "fp16", False)):
        outcome, _ = train_here(params_with(), label, scratch_inputs, tmp_path / name, lm_head_fp32=head)
        assert outcome.status == "succeeded", outcome.failure
        assert outcome.observed is not None
        assert outcome.observed.rollout_head == (("float32",) if head else (outcome.observed.rollout[0],))
        rms[name] = worst(tmp_path / name, "mismatch_rms")
    assert rms["bf16"] > rms["bf16 + fp32 head"] > rms["fp16"] > 1e-5, rms


def test_a_rollout_in_another_dtype_than_planned_does_not_count(scratch_inputs: Inputs, tmp_path: Path) -> None:
    outcome, _ = train_here(params_with(), "bf16", scratch_inputs, tmp_path, rollout_dtype="float32")
    assert outcome.status == "succeeded" and outcome.observed is not None
    assert outcome.observed.rollout == ("float32",) and outcome.observed.forward == ("bfloat16",)

    def train_copy_in_bf16(trainer: object) -> None:
        trainer.precision = trainer.precision.model_copy(update={"rollout_dtype": None})  # type: ignore[attr-defined]

    ignored, _ = train_here(params_with(), "bf16", scratch_inputs, tmp_path / "ignored", tweak=train_copy_in_bf16, rollout_dtype="float32")
    assert ignored.status == "failed" and ignored.failure is not None
    assert "rollout ran in bfloat16, planned float32" in ignored.failure.message


def test_the_recorder_gives_the_log_probability_of_what_was_sampled() -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 2, 5)
    recorder = SamplingRecorder(temperature=2.0)
    tokens = torch.tensor([[0, 1, 4], [3, 2, 2]])
    for position in range(3):
        sequence = torch.cat([torch.tensor([[9], [9]]), tokens[:, :position]], dim=1)
        assert torch.equal(recorder(sequence, scores[position]), scores[position])
    # the second completion ended after two tokens
    found = recorder.log_probs([[0, 1, 4], [3, 2]])
    expected = (scores / 2.0).log_softmax(dim=-1).gather(2, tokens.T[:, :, None])[:, :, 0].T
    assert found[0] == pytest.approx(expected[0].tolist()) and found[1] == pytest.approx(expected[1, :2].tolist())


def test_the_meter_adds_up_masked_tokens_of_a_step() -> None:
    meter = MismatchMeter()
    meter.add(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, 7.0]]), torch.tensor([[1, 0]]))
    meter.add(torch.tensor([[-2.0]]), torch.tensor([[-1.0]]), torch.tensor([[1]]))
    found = meter.metrics()
    assert found["mismatch_max"] == 1.0
    assert found["mismatch_rms"] == pytest.approx(math.sqrt((0.25 + 1.0) / 2))
    assert found["mismatch_kl"] == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-1)) / 2)
    assert found["mismatch_relative"] == pytest.approx(math.sqrt(1.25 / 5.0))
    assert MismatchMeter().metrics() == {}
