"""The grad scaler through a whole run: skips, back-off, growth, what it cannot mend, and what it is for (cases P2, P4, P5, H8)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tasks.attempt_files import read_steps
from tasks.programs.grpo import MeteredGRPOTrainer, weights_digest
from tasks.programs.mismatch import MismatchMeter
from tasks.programs.observation import first_non_finite_layer
from tests.programs.in_process import params_with, scale_loss, spoil_gradient, train_here
from tests.training_runs import Inputs

pytestmark = pytest.mark.device

LAYER = "model.layers.1.mlp.up_proj.weight"


class WeightsAfterEachStep(TrainerCallback):  # type: ignore[misc]
    """Keeps a hash of the weights after each step."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.digests.append(weights_digest(kwargs["model"]))


def column(attempt_dir: Path, name: str) -> list[float]:
    return [step[name] for step in read_steps(attempt_dir)]


def test_an_overflow_is_skipped_backed_off_and_grown_out_of(scratch_inputs: Inputs, tmp_path: Path) -> None:
    watcher = WeightsAfterEachStep()

    def tweak(trainer: MeteredGRPOTrainer) -> None:
        trainer.add_callback(watcher)
        spoil_gradient(LAYER, float("inf"), lambda step: step == 3)(trainer)

    params = params_with({"growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.125, "init_scale": 1024.0}, max_steps=6)
    outcome, _ = train_here(params, "fp16", scratch_inputs, tmp_path, tweak=tweak)
    assert outcome.status == "succeeded", outcome.failure
    # two good steps grow it, the overflow shrinks it, two good steps grow it again
    assert column(tmp_path, "loss_scale") == [1024, 4096, 512, 512, 2048, 2048]
    assert column(tmp_path, "step_skipped") == [0, 0, 1, 0, 0, 0]
    assert column(tmp_path, "consecutive_skips") == [0, 0, 1, 0, 0, 0]
    assert column(tmp_path, "skipped_steps") == [0, 0, 1, 1, 1, 1]
    unchanged = [before == after for before, after in zip(watcher.digests, watcher.digests[1:], strict=False)]
    assert unchanged == [False, True, False, False, False]
    # P4: linear decay over 6 steps, one of them skipped
    assert column(tmp_path, "learning_rate") == pytest.approx([3e-3 * share / 6 for share in (6, 5, 4, 4, 3, 2)])
    overflow = next(item for item in outcome.warnings if item.name == "fp16_overflow")
    assert (overflow.step, overflow.message.count(f"backward of {LAYER}")) == (3, 2)
    assert outcome.skipped_steps == 1


def test_gradients_that_never_are_finite_end_as_diverged_within_the_limit(scratch_inputs: Inputs, tmp_path: Path) -> None:
    params = params_with({"max_consecutive_skips": 3}, max_steps=9, save_steps=1)
    tweak = spoil_gradient(LAYER, float("nan"), lambda step: step > 2)
    outcome, _ = train_here(params, "fp16", scratch_inputs, tmp_path, tweak=tweak)
    assert outcome.status == "diverged" and outcome.failure is not None
    assert "step 5: 3 optimizer steps in a row were skipped" in outcome.failure.message
    assert f"backward of {LAYER}" in outcome.failure.message
    assert outcome.checkpoint_dir is None and not (tmp_path / "checkpoint").exists()
    # a skipped step saves no state: what goes on from here repeats it
    assert outcome.last_state_dir == tmp_path / "states" / "checkpoint-2"
    assert sorted(path.name for path in (tmp_path / "states").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_a_nan_loss_without_a_scaler_stops_at_its_step(scratch_inputs: Inputs, tmp_path: Path) -> None:
    tweak = scale_loss(float("nan"), lambda step: step == 2)
    outcome, _ = train_here(params_with(max_steps=4, save_steps=1), "bf16", scratch_inputs, tmp_path, tweak=tweak)
    assert outcome.status == "diverged" and outcome.failure is not None
    assert outcome.failure.message.startswith("step 2: loss is nan")
    assert outcome.last_state_dir == tmp_path / "states" / "checkpoint-1"


def too_wide(trainer: MeteredGRPOTrainer) -> None:
    # the products of this layer come out far beyond 65504, as in models that are known to overflow in fp16
    trainer.model.model.layers[1].mlp.down_proj.weight.data.mul_(1e9)


def test_h8_activations_beyond_fp16_are_a_range_problem_not_a_crash(scratch_inputs: Inputs, tmp_path: Path) -> None:
    outcome, _ = train_here(params_with(max_steps=8), "fp16", scratch_inputs, tmp_path / "rollout", tweak=too_wide)
    assert outcome.status == "diverged" and outcome.failure is not None
    assert outcome.failure.phase == "rollout"
    assert "the output of model.layers.1.mlp.down_proj is the first that is not" in outcome.failure.message
    assert "range" in outcome.failure.message and "bf16" in outcome.failure.message

    limit = params_with({"max_consecutive_skips": 2}, max_steps=8)
    training, _ = train_here(limit, "fp16", scratch_inputs, tmp_path / "training", tweak=too_wide, rollout_dtype="float32")
    assert training.status == "diverged" and training.failure is not None
    assert "range problem" in training.failure.message and "forward of model.layers.1.mlp.down_proj" in training.failure.message
    assert column(tmp_path / "training", "loss_scale") == [32768, 16384]

    in_bf16, _ = train_here(params_with(), "bf16", scratch_inputs, tmp_path / "bf16", tweak=too_wide)
    assert in_bf16.status == "succeeded", in_bf16.failure


def test_p5_the_recorded_norm_is_that_of_the_unscaled_gradient(scratch_inputs: Inputs, tmp_path: Path) -> None:
    norms = {}
    for label in ("fp32", "fp16"):
        outcome, _ = train_here(
            params_with(max_steps=1, max_grad_norm=1e-3), label, scratch_inputs, tmp_path / label, rollout_dtype="float32"
        )
        assert outcome.status == "succeeded", outcome.failure
        (norms[label],) = column(tmp_path / label, "grad_norm")
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.01)


def test_small_gradients_underflow_without_scaling_and_not_with_it(scratch_inputs: Inputs, tmp_path: Path) -> None:
    """Why fp16 without a grad scaler is refused."""
    share = {}
    for scale in (1.0, 65536.0):
        params = params_with({"init_scale": scale, "growth_interval": 1000}, max_steps=1)
        train_here(params, "fp16", scratch_inputs, tmp_path / f"{scale:g}", tweak=scale_loss(1e-5))
        (share[scale],) = column(tmp_path / f"{scale:g}", "gradient_underflow_fraction")
    assert share[1.0] > 0.9 and share[65536.0] < 0.1, share


def test_a_scale_below_one_is_said(scratch_inputs: Inputs, tmp_path: Path) -> None:
    outcome, _ = train_here(
        params_with({"init_scale": 1.0}, max_steps=2),
        "fp16",
        scratch_inputs,
        tmp_path,
        tweak=spoil_gradient(LAYER, float("inf"), lambda step: step == 1),
    )
    assert {"loss_scale_collapsed", "skipped_steps", "fp16_overflow"} <= {item.name for item in outcome.warnings}


def test_one_forward_that_was_not_finite_costs_a_step_and_not_the_run(scratch_inputs: Inputs, tmp_path: Path) -> None:
    tweak = scale_loss(float("nan"), lambda step: step == 2)
    outcome, _ = train_here(params_with(max_steps=4), "fp16", scratch_inputs, tmp_path, tweak=tweak)
    # the forward that looks for the layer is part of no step: it is not observed
    assert outcome.status == "succeeded", outcome.failure
    assert column(tmp_path, "step_skipped") == [0, 1, 0, 0]
    overflow = next(item for item in outcome.warnings if item.name == "fp16_overflow")
    assert "forward of the loss itself" in overflow.message


def test_a_weight_that_is_not_finite_reaches_no_training_state(scratch_inputs: Inputs, tmp_path: Path) -> None:
    class Breaks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                kwargs["model"].model.layers[0].mlp.up_proj.weight.data[0, 0] = float("inf")

    def tweak(trainer: MeteredGRPOTrainer) -> None:
        trainer.add_callback(Breaks())

    outcome, _ = train_here(params_with(max_steps=4, save_steps=1), "bf16", scratch_inputs, tmp_path, tweak=tweak)
    assert outcome.status == "diverged" and outcome.failure is not None
    assert "1 weight tensors are no longer finite, the first is model.layers.0.mlp.up_proj.weight" in outcome.failure.message
    assert outcome.last_state_dir == tmp_path / "states" / "checkpoint-1"


def test_a_shortage_while_looking_for_the_layer_costs_only_its_name() -> None:
    class Full(torch.nn.Module):
        def forward(self, **_: Any) -> torch.Tensor:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    assert "could not be found" in str(first_non_finite_layer(Full(), torch.ones(1, 2, dtype=torch.long)))


def test_a_gradient_that_is_not_finite_without_a_scaler_stops_at_its_step(scratch_inputs: Inputs, tmp_path: Path) -> None:
    tweak = spoil_gradient(LAYER, float("nan"), lambda step: step == 2)
    outcome, _ = train_here(params_with(max_steps=4), "bf16", scratch_inputs, tmp_path, tweak=tweak)
    assert outcome.status == "diverged" and outcome.failure is not None
    assert outcome.failure.message.startswith("step 2: grad_norm is nan")


@pytest.mark.parametrize("name", ["mismatch_kl", "reward"])
def test_other_numbers_that_are_not_finite_stop_too(
    name: str, scratch_inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tweak(trainer: MeteredGRPOTrainer) -> None:
        if name == "mismatch_kl":
            monkeypatch.setattr(MismatchMeter, "metrics", lambda meter: {"mismatch_kl": float("nan")})
        else:
            score = trainer._generate_and_score_completions

            def score_without_end(inputs: Any) -> Any:
                scored = score(inputs)
                # a NaN would be left out of TRL's mean
                trainer._metrics["train"]["reward"].append(float("inf"))
                return scored

            trainer._generate_and_score_completions = score_without_end
            spoil_gradient(LAYER, float("inf"), lambda step: True)(trainer)

    # the reward is watched on skipped steps as well
    label = "fp16" if name == "reward" else "bf16"
    outcome, _ = train_here(params_with(max_steps=4), label, scratch_inputs, tmp_path, tweak=tweak)
    assert outcome.status == "diverged" and outcome.failure is not None
    assert outcome.failure.message.startswith(f"step 1: {name} is {'inf' if name == 'reward' else 'nan'}")


def test_weights_that_break_after_the_last_state_are_no_success(scratch_inputs: Inputs, tmp_path: Path) -> None:
    class Breaks(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["model"].model.norm.weight.data[0] = float("nan")

    outcome, _ = train_here(params_with(), "fp32", scratch_inputs, tmp_path, tweak=lambda trainer: trainer.add_callback(Breaks()))
    assert outcome.status == "diverged" and outcome.failure is not None
    assert "model.norm.weight" in outcome.failure.message and outcome.checkpoint_dir is None


def test_p2_weights_equal_to_the_start_are_no_success(scratch_inputs: Inputs, tmp_path: Path) -> None:
    outcome, _ = train_here(params_with(), "fp32", scratch_inputs, tmp_path, tweak=scale_loss(0.0))
    assert outcome.status == "diverged" and outcome.failure is not None
    assert "the weights are those it started from" in outcome.failure.message and outcome.weights_changed is False
