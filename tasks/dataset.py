"""The problems that training and evaluation use."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.errors import RefusedInput
from tasks.files import read_record
from tasks.inputs import find_or_build
from tasks.params import Params
from tasks.records import ArtifactVersion, DatasetVersion
from tasks.specs import MANIFEST_FILE, DatasetManifest, DatasetRequest, dataset_spec


@task(cache_policy=NO_CACHE)
def prepare_dataset(params: Params, base_model: ArtifactVersion, run_dir: Path) -> DatasetVersion:
    """Return the dataset's folder with its counts, built once for each spec."""
    version = find_or_build(
        "datasets",
        dataset_spec(params.dataset, params.base_model),
        "tasks.programs.prepare_dataset",
        lambda out_dir: DatasetRequest(
            dataset=params.dataset, base_model=params.base_model, base_model_dir=base_model.path.resolve(), out_dir=out_dir
        ),
        run_dir,
    )
    counts = read_record(version.path / MANIFEST_FILE, DatasetManifest)
    get_run_logger().info(
        f"dataset: {counts.num_train} training and {counts.num_eval} held-out problems; left out: {counts.num_dropped} prompts "
        f"above {params.dataset.max_prompt_length} tokens, {counts.num_held_out_in_train} training problems that are held out"
    )
    groups = params.training.effective_batch_size // params.training.num_generations
    if counts.num_train < groups:
        raise RefusedInput(
            f"a step takes {groups} prompts (effective batch {params.training.effective_batch_size} / num_generations "
            f"{params.training.num_generations}), but the dataset has {counts.num_train}; raise dataset.num_train"
        )
    return DatasetVersion(version=version, num_train=counts.num_train, num_eval=counts.num_eval, num_dropped=counts.num_dropped)
