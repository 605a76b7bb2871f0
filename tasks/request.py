"""What a person or a schedule asked for, as one checked Params: a params file, its overrides, or a run to go on with."""

import re
from pathlib import Path

from tasks.engines.catalog import ENGINES
from tasks.errors import RefusedInput
from tasks.levers import LEVER_NAMES, TASK_CHANGING
from tasks.params import Params, PrecisionMode, differences, load_params
from tasks.places import PROJECT_DIR
from tasks.records import Hardware
from tasks.run_folder import PARAMS_FILE, find_run

# what a resume may set, since it changes neither the task nor the loss
FREE_LEVERS = ("gradient_accumulation_steps", *(field for field, name in LEVER_NAMES.items() if name not in TASK_CHANGING))
SETTABLE = re.compile(rf"memory\..*|training\.({'|'.join(FREE_LEVERS)})")


def resolve_params(
    params: str,
    precision: PrecisionMode | None = None,
    max_steps: int | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    memory_budget_mb: float | None = None,
    overrides: list[str] | None = None,
    resume: str | None = None,
    flow: str = "retrain",
) -> Params:
    """Return the params of a request to a flow; the flow's own parameters and `overrides` go through the same checks.

    Raises:
        RefusedInput: the file or a value is refused, or `resume` comes with overrides that change the task or the loss.
    """
    named = {
        "precision.mode": precision,
        "training.max_steps": max_steps,
        "training.learning_rate": learning_rate,
        "training.seed": seed,
        "memory.budget_mb": memory_budget_mb,
    }
    asked = (*(f"{key}={value}" for key, value in named.items() if value is not None), *(overrides or ()))
    if resume is None:
        # a deployment's flow runs elsewhere than its caller; messages stay short where they can
        return load_params(Path(params) if Path(params).exists() else PROJECT_DIR / params, asked)
    path = find_run(resume, flow).run_dir / PARAMS_FILE
    kept, resolved = load_params(path), load_params(path, asked)
    batch = kept.training.effective_batch_size, resolved.training.effective_batch_size
    changed = {path: pair for path, pair in differences(kept, resolved).items() if flow != "retrain" or not SETTABLE.fullmatch(path)}
    changed |= {} if batch[0] == batch[1] else {"per_device_train_batch_size x gradient_accumulation_steps": batch}
    if changed:
        found = ", ".join(f"{path} {old} -> {new}" for path, (old, new) in changed.items())
        free = f"what may be set on a resume is memory.* and training.{', '.join(FREE_LEVERS)}" if flow == "retrain" else "leave it out"
        raise RefusedInput(f"--resume {resume}: a resumed run keeps its task and its loss, but {found}; {free}, or start a new run")
    return resolved


def check_engine(hardware: Hardware, params: Params) -> None:
    """Raise RefusedInput if the chosen engine cannot do what the params ask on this hardware."""
    ENGINES[params.training.engine].check(hardware, params)
