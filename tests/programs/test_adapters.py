"""LoRA: what trains, in which dtype, what samples, what a state and the checkpoint hold (case P6 for adapters)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tasks.attempt_files import read_steps
from tasks.programs import adapters, grpo
from tasks.programs.grpo import MeteredGRPOTrainer, weights_digest
from tests.programs.in_process import DEVICE, params_with, train_here
from tests.programs.test_training_states import numbers
from tests.training_runs import Inputs

pytestmark = pytest.mark.device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LORA = {"lora_rank": 4}
ADAPTER = "base_model.model.model.layers.1.mlp.down_proj"


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("label", ["fp32", "bf16", "fp16"])
def test_only_adapters_train_and_the_checkpoint_is_base_plus_delta(
    label: str, scratch_inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "SMALLEST_FILE_BYTES", 2**12)  # several files
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}

    def keep(trainer: MeteredGRPOTrainer) -> None:
        train = trainer.train
        before.update(weights_of(trainer.model))
        trainer.train = lambda **kwargs: (train(**kwargs), after.update(weights_of(trainer.model)))

    outcome, _ = train_here(params_with(max_steps=2), label, scratch_inputs, tmp_path, tweak=keep, levers=LORA)
    assert outcome.status == "succeeded", outcome.failure
    assert outcome.weights_changed and outcome.observed is not None
    # after the merge too: what ran is what is told
    assert outcome.observed.trainable_weights == ("float32",)
    for name, weight in after.items():
        adapter = ".lora_" in name
        assert weight.dtype == (torch.float32 if adapter else DTYPES[label])
        assert torch.equal(weight, before[name]) != adapter, name
    assert not any("lora" in name and ("lm_head" in name or "embed" in name) for name in after)
    model = AutoModelForCausalLM.from_pretrained(outcome.checkpoint_dir)
    assert model.dtype == torch.float32
    merged = 0
    for name, weight in model.named_parameters():
        layer = f"base_model.model.{name}".removesuffix(".weight")
        if f"{layer}.base_layer.weight" not in after:
            assert torch.equal(weight, after[f"{layer}.weight"].float())
            continue
        delta = after[f"{layer}.lora_B.default.weight"] @ after[f"{layer}.lora_A.default.weight"] * (32 / 4)
        assert torch.equal(weight, after[f"{layer}.base_layer.weight"].float() + delta)
        merged += 1
    assert merged == 7 * model.config.num_hidden_layers


def test_the_rollout_samples_from_the_adapted_model(scratch_inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_with(max_steps=4, learning_rate=0.03)
    shared: list[int] = []
    copy = grpo.cast_copy

    def watched(model: Any, dtype: torch.dtype) -> Any:
        clone = copy(model, dtype)
        theirs = {weight.data_ptr() for weight in clone.parameters()}
        shared.append(sum(weight.numel() for weight in model.parameters() if weight.data_ptr() in theirs and not weight.requires_grad))
        return clone

    monkeypatch.setattr(grpo, "cast_copy", watched)
    _, run = train_here(params, "bf16", scratch_inputs, tmp_path / "true", levers=LORA)
    # the frozen weights are there once
    assert set(shared) == {sum(weight.numel() for weight in run.trainer.model.parameters() if not weight.requires_grad)}
    train_here(params, "bf16", scratch_inputs, tmp_path / "full")

    def without_adapters(model: Any, dtype: torch.dtype) -> Any:
        clone = copy(model, dtype)
        clone.disable_adapter_layers()
        return clone

    monkeypatch.setattr(grpo, "cast_copy", without_adapters)
    train_here(params, "bf16", scratch_inputs, tmp_path / "base", levers=LORA)
    adapted, full, base = (read_steps(tmp_path / name)[-1]["mismatch_kl"] for name in ("true", "full", "base"))
    assert adapted < 2 * full
    assert base > 100 * adapted


def test_beta_has_the_model_without_adapters_as_reference_and_holds_no_second_one(scratch_inputs: Inputs, tmp_path: Path) -> None:
    # another dtype samples, and the reference's forward must not be taken for the rollout's
    params = params_with(max_steps=3, beta=0.1, gradient_checkpointing=True)
    outcome, run = train_here(params, "fp16", scratch_inputs, tmp_path, levers=LORA, rollout_dtype="bfloat16")
    assert outcome.status == "succeeded", outcome.failure
    assert run.trainer.ref_model is None and list(run.trainer.model.peft_config) == ["default"]
    first, *later = [step["kl"] for step in read_steps(tmp_path)]
    assert first == pytest.approx(0, abs=1e-6) and all(kl > 1e-5 for kl in later)


def test_gradient_checkpointing_changes_no_gradient(scratch_inputs: Inputs, tmp_path: Path) -> None:
    for name, on in {"plain": False, "saving": True}.items():
        levers = {**LORA, "gradient_checkpointing": on}
        outcome, _ = train_here(params_with(max_steps=2), "bf16", scratch_inputs, tmp_path / name, levers=levers)
        assert outcome.status == "succeeded", outcome.failure
    plain, saving = ([step["grad_norm"] for step in read_steps(tmp_path / name)] for name in ("plain", "saving"))
    assert saving == pytest.approx(plain, rel=1e-2) and min(plain) > 0


def test_a_head_in_fp32_works_on_tied_embeddings(scratch_inputs: Inputs, tmp_path: Path) -> None:
    outcome, run = train_here(params_with(), "bf16", scratch_inputs, tmp_path, levers=LORA, lm_head_fp32=True)
    assert outcome.status == "succeeded", outcome.failure
    assert outcome.observed is not None
    assert (outcome.observed.rollout, outcome.observed.rollout_head) == (("bfloat16",), ("float32",))
    assert run.trainer.model.config.tie_word_embeddings


@pytest.mark.parametrize("label", ["bf16", "fp16"])
def test_a_resumed_run_is_the_straight_run(label: str, scratch_inputs: Inputs, tmp_path: Path) -> None:
    params = params_with(max_steps=4, save_steps=2)
    straight, first = train_here(params, label, scratch_inputs, tmp_path / "straight", levers=LORA)
    again, _ = train_here(params, label, scratch_inputs, tmp_path / "again", levers=LORA)
    state = tmp_path / "straight" / "states" / "checkpoint-2"
    resumed, second = train_here(params, label, scratch_inputs, tmp_path / "resumed", levers=LORA, resume_from=state)
    assert straight.status == again.status == resumed.status == "succeeded", resumed.failure
    # adapters only: a state of them is small
    assert (state / "adapter_model.safetensors").is_file() and not (state / "model.safetensors").exists()
    if DEVICE == "cpu":
        assert numbers(tmp_path / "again") == numbers(tmp_path / "straight")
        assert numbers(tmp_path / "resumed") == numbers(tmp_path / "straight")[2:]
        assert weights_digest(second.trainer.model) == weights_digest(first.trainer.model)
    ended, third = train_here(
        params, label, scratch_inputs, tmp_path / "ended", levers=LORA, resume_from=tmp_path / "straight" / "states" / "checkpoint-4"
    )
    assert ended.status == "succeeded" and weights_digest(third.trainer.model) == weights_digest(first.trainer.model)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, LORA, "checkpoint-1 holds all weights, the attempt trains adapters of rank 4: start it anew"),
        (LORA, {}, "checkpoint-1 holds adapters of rank 4, the attempt trains all weights: start it anew"),
        (LORA, {"lora_rank": 2}, "holds adapters of rank 4, the attempt trains adapters of rank 2"),
    ],
)
def test_a_state_of_other_weights_is_refused(before: Any, after: Any, said: str, scratch_inputs: Inputs, tmp_path: Path) -> None:
    params = params_with(max_steps=2, save_steps=1)
    train_here(params, "fp32", scratch_inputs, tmp_path / "before", levers=before)
    state = tmp_path / "before" / "states" / "checkpoint-1"
    outcome, run = train_here(params, "fp32", scratch_inputs, tmp_path / "after", levers=after, resume_from=state)
    assert outcome.status == "failed" and outcome.failure is not None and outcome.failure.error_type == "RefusedInput"
    assert said in outcome.failure.message
    # before anything is loaded
    assert run.trainer is None


def test_an_overflow_of_an_adapter_is_seen_by_name(scratch_inputs: Inputs, tmp_path: Path) -> None:
    def spoil(trainer: MeteredGRPOTrainer) -> None:
        weight = trainer.model.get_parameter(f"{ADAPTER}.lora_B.default.weight")
        weight.register_hook(lambda gradient: gradient * float("inf") if trainer.state.global_step == 0 else gradient)

    outcome, _ = train_here(params_with(max_steps=3), "fp16", scratch_inputs, tmp_path, tweak=spoil, levers=LORA)
    assert (outcome.status, outcome.skipped_steps) == ("succeeded", 1)
    assert any(f"{ADAPTER}.lora_B" in warning.message for warning in outcome.warnings)
    steps = read_steps(tmp_path)
    assert steps[0]["learning_rate"] == steps[1]["learning_rate"]
