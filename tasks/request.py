"""What a person or a schedule asked for, as one checked Params: a params file, its overrides, or a run to go on with."""

from pathlib import Path

from tasks.engines.catalog import ENGINES
from tasks.errors import RefusedInput
from tasks.params import Params, PrecisionMode, load_params
from tasks.places import PROJECT_DIR
from tasks.records import Hardware
from tasks.run_folder import PARAMS_FILE, find_run


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
        RefusedInput: the file or a value is refused, or `resume` comes with overrides.
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
    if asked:
        raise RefusedInput(f"a resumed run keeps its own params; leave out {', '.join(asked)}, or start a new run without resume")
    return load_params(find_run(resume, flow).run_dir / PARAMS_FILE)


def check_engine(hardware: Hardware, params: Params) -> None:
    """Raise RefusedInput if the chosen engine cannot do what the params ask on this hardware."""
    ENGINES[params.training.engine].check(hardware, params)
