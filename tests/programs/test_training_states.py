"""Going on from a training state: the same run as a straight one, in every precision, scaler included (cases P3, M5)."""

from pathlib import Path

import pytest

from tasks.attempt_files import read_steps
from tasks.params import parse_params
from tasks.programs.grpo import MeteredGRPOTrainer, weights_digest
from tests.programs.in_process import DEVICE, Tweak, params_with, spoil_gradient, train_here
from tests.training_runs import Inputs

pytestmark = pytest.mark.device

CLOCKS = ("time", "_time_ms", "tokens_per_second", "peak_memory_mb")
LAYER = "model.layers.0.mlp.up_proj.weight"


def numbers(attempt_dir: Path) -> list[dict[str, float]]:
    """Return each step's metrics without what a clock or the heap decides."""
    return [{name: value for name, value in step.items() if not name.endswith(CLOCKS)} for step in read_steps(attempt_dir)]


def recording(prompts: list[tuple[str, ...]], then: Tweak | None = None) -> Tweak:
    """Return a tweak that writes down the prompts of every rollout."""

    def tweak(trainer: MeteredGRPOTrainer) -> None:
        generate = trainer._generate
        trainer._generate = lambda asked: (prompts.append(tuple(asked)), generate(asked))[1]
        if then:
            then(trainer)

    return tweak


@pytest.mark.parametrize("label", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_is_the_straight_run(label: str, scratch_inputs: Inputs, tmp_path: Path) -> None:
    # in fp16 step 1 overflows, so that the scaler's state and the schedule are not those of a fresh start
    tweak = spoil_gradient(LAYER, float("inf"), lambda step: step == 1) if label == "fp16" else None
    params = params_with({"growth_interval": 4}, max_steps=6, save_steps=3)
    straight_prompts: list[tuple[str, ...]] = []
    resumed_prompts: list[tuple[str, ...]] = []
    straight, first = train_here(params, label, scratch_inputs, tmp_path / "straight", tweak=recording(straight_prompts, tweak))
    state = tmp_path / "straight" / "states" / "checkpoint-3"
    resumed, second = train_here(
        params, label, scratch_inputs, tmp_path / "resumed", tweak=recording(resumed_prompts, tweak), resume_from=state
    )
    assert (straight.status, resumed.status) == ("succeeded", "succeeded"), resumed.failure
    assert resumed_prompts == straight_prompts[3:]
    before, after = numbers(tmp_path / "straight")[3:], numbers(tmp_path / "resumed")
    for was, now in zip(before, after, strict=True):
        # counted from the attempt's own start
        was.pop("skipped_steps", None), now.pop("skipped_steps", None)
        # on one CPU the same products in the same order, bit for bit in every precision; a GPU adds up in no fixed order
        assert now == (was if DEVICE == "cpu" else pytest.approx(was, rel=0.05, abs=1e-3))
    if label == "fp16":
        assert [step["loss_scale"] for step in after] == [32768, 65536, 65536]
    if DEVICE == "cpu":
        assert weights_digest(second.trainer.model) == weights_digest(first.trainer.model)


def test_a_state_due_at_a_skipped_step_is_saved_after_the_next_that_trained(scratch_inputs: Inputs, tmp_path: Path) -> None:
    params = params_with(max_steps=7, save_steps=4)
    tweak = spoil_gradient(LAYER, float("inf"), lambda step: step in (4, 5))
    outcome, first = train_here(params, "fp16", scratch_inputs, tmp_path / "straight", tweak=tweak)
    assert outcome.status == "succeeded" and outcome.skipped_steps == 2, outcome.failure
    assert sorted(path.name for path in (tmp_path / "straight" / "states").iterdir() if path.name != ".writing") == [
        "checkpoint-6",
        "checkpoint-7",
    ]
    state = tmp_path / "straight" / "states" / "checkpoint-6"
    resumed, second = train_here(params, "fp16", scratch_inputs, tmp_path / "resumed", resume_from=state)
    assert (resumed.status, resumed.first_step, resumed.steps_done) == ("succeeded", 6, 7), resumed.failure
    assert [step["step"] for step in read_steps(tmp_path / "resumed")] == [7]
    if DEVICE == "cpu":
        assert weights_digest(second.trainer.model) == weights_digest(first.trainer.model)


def test_the_same_seed_is_the_same_run_and_another_is_not(scratch_inputs: Inputs, tmp_path: Path) -> None:
    for name, seed in {"first": 1, "again": 1, "other": 2}.items():
        train_here(params_with(max_steps=2, seed=seed), "fp16", scratch_inputs, tmp_path / name)
    first, again, other = (numbers(tmp_path / name) for name in ("first", "again", "other"))
    assert again == first if DEVICE == "cpu" else [step["reward"] for step in again] == pytest.approx([step["reward"] for step in first])
    assert other != first


@pytest.mark.parametrize(("before", "after"), [("fp16", "bf16"), ("fp32", "fp16")])
def test_another_precision_goes_on_from_the_state(before: str, after: str, scratch_inputs: Inputs, tmp_path: Path) -> None:
    params = params_with({"init_scale": 512.0}, max_steps=2, save_steps=1)
    train_here(params, before, scratch_inputs, tmp_path / "before")
    state = tmp_path / "before" / "states" / "checkpoint-1"
    outcome, _ = train_here(params, after, scratch_inputs, tmp_path / "after", resume_from=state)
    assert outcome.status == "succeeded", outcome.failure
    assert (outcome.first_step, outcome.steps_done) == (1, 2)
    assert outcome.final_loss_scale == (512.0 if after == "fp16" else None)


def test_m5_the_attempts_own_levers_win_over_those_of_the_state(scratch_inputs: Inputs, tmp_path: Path) -> None:
    large = params_with(max_steps=2, save_steps=1, per_device_train_batch_size=16, gradient_accumulation_steps=1)
    train_here(large, "fp32", scratch_inputs, tmp_path / "large")
    small = params_with(max_steps=2, save_steps=1, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    sizes: list[int] = []

    def tweak(trainer: MeteredGRPOTrainer) -> None:
        compute = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs: (sizes.append(len(inputs["prompt_ids"])), compute(model, inputs))[1]

    state = tmp_path / "large" / "states" / "checkpoint-1"
    shorter = {"max_completion_length": 4}
    outcome, _ = train_here(small, "fp32", scratch_inputs, tmp_path / "small", tweak=tweak, resume_from=state, levers=shorter)
    assert outcome.status == "succeeded", outcome.failure
    assert sizes == [8, 8]
    assert [step["completions/max_length"] for step in read_steps(tmp_path / "small")] == [4]


def test_a_state_of_the_last_step_is_saved_as_it_is_without_a_step_more(scratch_inputs: Inputs, tmp_path: Path) -> None:
    params = params_with(max_steps=2, save_steps=1)
    _, whole = train_here(params, "fp32", scratch_inputs, tmp_path / "whole")
    state = tmp_path / "whole" / "states" / "checkpoint-2"
    outcome, resumed = train_here(params, "fp16", scratch_inputs, tmp_path / "resumed", resume_from=state)
    assert outcome.status == "succeeded", outcome.failure
    assert (outcome.steps_done, outcome.observed, read_steps(tmp_path / "resumed")) == (2, None, [])
    assert weights_digest(resumed.trainer.model) == weights_digest(whole.trainer.model)
    assert outcome.checkpoint_dir is not None


def test_a_resumed_attempt_whose_steps_are_all_skipped_is_no_success(scratch_inputs: Inputs, tmp_path: Path) -> None:
    params = params_with({"init_scale": 1e30}, max_steps=4, save_steps=2)
    train_here(params, "bf16", scratch_inputs, tmp_path / "before")
    state = tmp_path / "before" / "states" / "checkpoint-2"
    outcome, _ = train_here(params, "fp16", scratch_inputs, tmp_path / "after", resume_from=state)
    assert (outcome.status, outcome.skipped_steps, outcome.weights_changed) == ("diverged", 2, False)


def test_g1_a_run_without_signal_is_no_success_however_often_it_is_gone_on_with(scratch_inputs: Inputs, tmp_path: Path) -> None:
    scorer = tmp_path / "constant.py"
    scorer.write_text("def score(completions, questions, answers):\n    return [0.5] * len(completions)\n")
    # weight decay moves the weights though no reward does
    tree = params_with(max_steps=4, save_steps=2, engine_args={"weight_decay": 0.1}).model_dump(mode="json")
    params = parse_params({**tree, "reward": {"scorer": f"{scorer}:score"}}, "constant")
    whole, _ = train_here(params, "fp32", scratch_inputs, tmp_path / "whole")
    state = tmp_path / "whole" / "states" / "checkpoint-2"
    resumed, _ = train_here(params, "fp32", scratch_inputs, tmp_path / "resumed", resume_from=state)
    for outcome in (whole, resumed):
        assert outcome.status == "diverged" and outcome.failure is not None
        assert outcome.failure.error_type == "NothingLearned"
