"""AdamW's states in 8 bits: they are, it learns, it resumes, it waits when a step is skipped, and it never loads foreign states."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from scipy.stats import mannwhitneyu

from tasks.attempt_files import read_steps
from tasks.programs.grpo import MeteredGRPOTrainer, weights_digest
from tests.programs.in_process import DEVICE, params_with, spoil_gradient, train_here
from tests.programs.test_training_states import LAYER, numbers
from tests.training_runs import Inputs

pytestmark = [pytest.mark.device, pytest.mark.slow]

EIGHT = {"optimizer_8bit": True}


@pytest.fixture(autouse=True)
def _no_overrides_of_another_run() -> Iterator[None]:
    # kept for the process's life, by the ids of parameters; a run of ours has a process of its own
    yield
    GlobalOptimManager.get_instance().initialize()


def states(trainer: MeteredGRPOTrainer) -> dict[str, dict[str, Any]]:
    names = {weight: name for name, weight in trainer.model.named_parameters()}
    return {names[weight]: state for weight, state in trainer.optimizer.optimizer.state.items()}


def test_states_are_in_8_bits_but_those_of_the_embeddings_and_of_small_tensors(scratch_inputs: Inputs, tmp_path: Path) -> None:
    outcome, run = train_here(params_with(max_steps=30, gradient_accumulation_steps=2), "fp32", scratch_inputs, tmp_path, levers=EIGHT)
    assert outcome.status == "succeeded", outcome.failure
    kept = {name: state["state1"].dtype for name, state in states(run.trainer).items()}
    wide = {name for name, dtype in kept.items() if dtype == torch.float32}
    # the tied head is the embeddings' own tensor
    assert wide == {name for name in kept if "norm" in name or name == "model.embed_tokens.weight"}
    assert kept[LAYER] == torch.uint8 and states(run.trainer)[LAYER]["state2"].dtype == torch.uint8
    rewards = [step["reward"] for step in read_steps(tmp_path)]
    assert mannwhitneyu(rewards[-8:], rewards[:8], alternative="greater").pvalue < 0.01


@pytest.mark.parametrize(("label", "more"), [("bf16", {}), ("fp16", {"lora_rank": 64})])
def test_a_resumed_run_is_the_straight_run(
    label: str, more: Any, scratch_inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params, levers = params_with(max_steps=4, save_steps=2), {**EIGHT, **more}
    _, first = train_here(params, label, scratch_inputs, tmp_path / "straight", levers=levers)
    state = tmp_path / "straight" / "states" / "checkpoint-2"
    outcome, second = train_here(params, label, scratch_inputs, tmp_path / "resumed", levers=levers, resume_from=state)
    assert outcome.status == "succeeded", outcome.failure
    assert "begin anew" not in capsys.readouterr().out
    assert torch.uint8 in {kept["state1"].dtype for kept in states(second.trainer).values()}
    if DEVICE == "cpu":
        assert numbers(tmp_path / "resumed") == numbers(tmp_path / "straight")[2:]
        assert weights_digest(second.trainer.model) == weights_digest(first.trainer.model)


def test_p4_a_skipped_step_moves_neither_states_nor_schedule(scratch_inputs: Inputs, tmp_path: Path) -> None:
    tweak = spoil_gradient(LAYER, float("inf"), lambda step: step == 2)
    outcome, run = train_here(params_with(max_steps=4, save_steps=1), "fp16", scratch_inputs, tmp_path, tweak=tweak, levers=EIGHT)
    assert (outcome.status, outcome.skipped_steps) == ("succeeded", 1), outcome.failure
    assert [step["step_skipped"] for step in read_steps(tmp_path)] == [0, 1, 0, 0]
    rates = [step["learning_rate"] for step in read_steps(tmp_path)]
    assert rates[1] == rates[2] > rates[3]
    assert {kept["step"] for kept in states(run.trainer).values()} == {3}


@pytest.mark.parametrize(("before", "after", "bits"), [({}, EIGHT, 32), (EIGHT, {}, 8)])
def test_states_of_the_other_optimizer_begin_anew_and_all_else_goes_on(
    before: Any, after: Any, bits: int, scratch_inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = params_with({"init_scale": 512.0, "growth_interval": 2}, max_steps=5, save_steps=3, lr_scheduler_type="linear")
    rates: list[float] = []

    def note_rates(trainer: MeteredGRPOTrainer) -> None:
        # those that the optimizer has: the log tells the schedule's
        clip = trainer._clip_grad_norm
        trainer._clip_grad_norm = lambda model: (rates.append(trainer.optimizer.param_groups[0]["lr"]), clip(model))[1]

    train_here(params, "fp16", scratch_inputs, tmp_path / "before", levers=before, tweak=note_rates)
    state = tmp_path / "before" / "states" / "checkpoint-3"
    outcome, run = train_here(params, "fp16", scratch_inputs, tmp_path / "after", levers=after, resume_from=state, tweak=note_rates)
    assert outcome.status == "succeeded", outcome.failure
    said = f"the optimizer's states begin anew: checkpoint-3 has them in {bits} bits"
    assert said in capsys.readouterr().out
    was, now = read_steps(tmp_path / "before")[3:], read_steps(tmp_path / "after")
    for name in ("step", "learning_rate", "loss_scale"):
        assert [step[name] for step in now] == [step[name] for step in was]
    assert rates[3:5] == rates[5:] and rates[3] > rates[4]
    if DEVICE == "cpu":
        # the same weights and prompts: the same first gradient
        assert now[0]["grad_norm"] == was[0]["grad_norm"]
    assert {int(kept["step"]) for kept in states(run.trainer).values()} == {2}


@pytest.mark.parametrize("levers", [{}, EIGHT], ids=["32bit", "8bit"])
def test_no_optimizer_steps_over_all_weights_at_once(levers: dict[str, Any], scratch_inputs: Inputs, tmp_path: Path) -> None:
    """torch's AdamW does so on CUDA unless told otherwise: a 7 B model would take 26 GB more at its peak."""
    params = params_with(max_steps=2, save_steps=1)
    _, run = train_here(params, "fp32", scratch_inputs, tmp_path / "once", levers=levers)
    assert run.trainer is not None
    assert [group["foreach"] for group in run.trainer.optimizer.param_groups] == [False, False]
    outcome, run = train_here(
        params, "fp32", scratch_inputs, tmp_path / "again", levers=levers, resume_from=tmp_path / "once" / "states" / "checkpoint-1"
    )
    assert outcome.status == "succeeded" and run.trainer is not None
    assert [group["foreach"] for group in run.trainer.optimizer.param_groups] == [False, False]
