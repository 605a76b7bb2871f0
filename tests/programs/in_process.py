"""Run the training program's own code in the test's process, so that a test can inject what no configuration asks for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tasks.levers import baseline_levers
from tasks.params import Params, parse_params
from tasks.programs import train as program
from tasks.programs.device_memory import device_memory
from tasks.programs.grpo import MeteredGRPOTrainer
from tasks.records import Attempt, Outcome, TrainingJob
from tests.training_runs import Inputs, precision, smoke_params

Tweak = Callable[[MeteredGRPOTrainer], None]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def params_with(precision: dict[str, Any] | None = None, **training: Any) -> Params:
    """Return small params with fields of the sections `precision` and `training` replaced."""
    tree = smoke_params(**training).model_dump(mode="json")
    return parse_params({**tree, "precision": precision or {}}, "in_process")


def train_here(
    params: Params,
    label: str,
    inputs: Inputs,
    attempt_dir: Path,
    *,
    tweak: Tweak | None = None,
    resume_from: Path | None = None,
    levers: dict[str, Any] | None = None,
    **fields: Any,
) -> tuple[Outcome, program.TrainingRun]:
    """Run one attempt as ``tasks.programs.train`` does; `tweak` gets the trainer before the first step.

    `levers` replace those of the params, `fields` those of the Precision.
    """
    attempt = Attempt(
        number=1,
        label="baseline",
        precision=precision(label).model_copy(update=fields),
        levers=baseline_levers(params).model_copy(update=levers or {}),
        engine="trl_local",
        reason="a test",
        resume_from=resume_from,
    )
    attempt_dir.mkdir(parents=True, exist_ok=True)
    job = TrainingJob(
        attempt=attempt,
        params=params.model_dump(mode="json"),
        dataset_dir=inputs.dataset_dir,
        base_model_dir=inputs.base_model_dir,
        attempt_dir=attempt_dir,
    )
    run = program.TrainingRun(job, DEVICE, device_memory(DEVICE), job.attempt_dir)
    build = run._build_trainer

    def build_and_tweak(model: Any) -> MeteredGRPOTrainer:
        trainer = build(model)
        if tweak:
            tweak(trainer)
        return trainer

    run._build_trainer = build_and_tweak  # type: ignore[method-assign]
    try:
        return program.outcome_of(run), run
    finally:
        run.memory.close()


def spoil_gradient(name: str, factor: float, steps: Callable[[int], bool]) -> Tweak:
    """Multiply one parameter's gradient by `factor` in the optimizer steps that `steps` picks, counted from 1."""

    def tweak(trainer: MeteredGRPOTrainer) -> None:
        weight = dict(trainer.model.named_parameters())[name]
        weight.register_hook(lambda gradient: gradient * factor if steps(trainer.state.global_step + 1) else gradient)

    return tweak


def scale_loss(factor: float, steps: Callable[[int], bool] = lambda step: True) -> Tweak:
    """Multiply the loss by `factor` in the optimizer steps that `steps` picks, counted from 1."""

    def tweak(trainer: MeteredGRPOTrainer) -> None:
        compute = trainer._compute_loss
        trainer._compute_loss = lambda model, inputs: compute(model, inputs) * (factor if steps(trainer.state.global_step + 1) else 1.0)

    return tweak
