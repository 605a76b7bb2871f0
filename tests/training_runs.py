"""Run the training program alone, on a model made from scratch, as an engine would."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.engines.trl_local import TrlLocal
from tasks.files import write_record
from tasks.levers import baseline_levers
from tasks.params import Params, parse_params
from tasks.processes import run_program
from tasks.records import Attempt, Hardware, MemoryLevers, Outcome, Precision, TrainingJob
from tests.machines import hardware_of

CPU = "cpu_epyc_9r14"


@dataclass(frozen=True)
class Inputs:
    """A base model and a dataset for it."""

    base_model_dir: Path
    dataset_dir: Path


def smoke_params(**training: Any) -> Params:
    """Return params/smoke.yaml's params in small, with training fields replaced."""
    tree = {
        "base_model": {"source": "scratch", "hidden_size": 64, "num_hidden_layers": 2},
        "dataset": {"source": "byte_prompts", "num_train": 64},
        "reward": {"scorer": "byte_share"},
        "training": {
            "max_steps": 2,
            "learning_rate": 3e-3,
            "per_device_train_batch_size": 16,
            "gradient_accumulation_steps": 1,
            "max_completion_length": 16,
            **training,
        },
    }
    return parse_params(tree, "smoke_params")


def precision(label: str) -> Precision:
    """Return a precision by the name people use."""
    return Precision(mixed_precision="no" if label == "fp32" else label, grad_scaler=label == "fp16")  # type: ignore[arg-type]


def train(
    params: Params,
    label: str,
    inputs: Inputs,
    attempt_dir: Path,
    *,
    levers: MemoryLevers | None = None,
    resume_from: Path | None = None,
    environment: dict[str, str] | None = None,
    hardware: Hardware | None = None,
    fields: dict[str, Any] | None = None,
) -> Outcome:
    """Run one attempt as a child process and return its outcome; `fields` are the Precision's."""
    job = write_job(params, label, inputs, attempt_dir, levers=levers, resume_from=resume_from, fields=fields)
    machine = hardware or hardware_of(CPU)
    command = TrlLocal().command(job, machine)
    ended = run_program(
        command.module,
        command.arguments,
        attempt_dir / "train.log",
        environment={**os.environ, **command.environment, **(environment or {})},
        timeout_seconds=900,
    )
    return TrlLocal().outcome(job, ended, machine, 0)


def write_job(
    params: Params,
    label: str,
    inputs: Inputs,
    attempt_dir: Path,
    *,
    levers: MemoryLevers | None = None,
    resume_from: Path | None = None,
    fields: dict[str, Any] | None = None,
) -> TrainingJob:
    """Write what one attempt is given."""
    attempt = Attempt(
        number=1,
        label="baseline",
        precision=precision(label).model_copy(update=fields or {}),
        levers=levers or baseline_levers(params),
        engine="trl_local",
        reason="a test",
        resume_from=resume_from,
    )
    job = TrainingJob(
        attempt=attempt,
        params=params.model_dump(mode="json"),
        dataset_dir=inputs.dataset_dir,
        base_model_dir=inputs.base_model_dir,
        attempt_dir=attempt_dir,
    )
    write_record(attempt_dir / "attempt.json", job)
    return job
