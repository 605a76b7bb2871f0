"""The model that training starts from."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.inputs import find_or_build
from tasks.params import Params
from tasks.records import ArtifactVersion
from tasks.specs import BaseModelRequest, base_model_spec


@task(cache_policy=NO_CACHE)
def fetch_base_model(params: Params, run_dir: Path) -> ArtifactVersion:
    """Return the base model's folder, built once for each spec."""
    return find_or_build(
        "base_models",
        base_model_spec(params.base_model),
        "tasks.programs.fetch_base_model",
        lambda out_dir: BaseModelRequest(base_model=params.base_model, out_dir=out_dir),
        run_dir,
    )
