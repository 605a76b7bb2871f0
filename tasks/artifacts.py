"""What DVC keeps of a run: base model and dataset, found by their spec or built once into the store, and the trained checkpoint."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.errors import AttemptFailed, RefusedInput
from tasks.files import file_lock, read_record
from tasks.params import Params
from tasks.places import PROJECT_DIR, STORE_DIR
from tasks.program_request import ask_program
from tasks.records import ArtifactVersion, DatasetVersion, FinishedAttempt, RunFolder
from tasks.specs import MANIFEST_FILE, BaseModelRequest, DatasetManifest, DatasetRequest, Spec, base_model_spec, dataset_spec
from tasks.versioning.inputs import find_input, input_key
from tasks.versioning.store import Kind, store_folder


@task(cache_policy=NO_CACHE)
def fetch_base_model(params: Params, run_dir: Path) -> ArtifactVersion:
    """Return the base model's folder, built once for each spec."""
    request = BaseModelRequest(base_model=params.base_model, out_dir=run_dir.resolve() / "base_models" / "built")
    return _find_or_build("base_models", base_model_spec(params.base_model), "tasks.programs.fetch_base_model", request)


@task(cache_policy=NO_CACHE)
def prepare_dataset(params: Params, base_model: ArtifactVersion, run_dir: Path) -> DatasetVersion:
    """Return the dataset's folder with its counts, built once for each spec."""
    out_dir = run_dir.resolve() / "datasets" / "built"
    request = DatasetRequest(
        dataset=params.dataset, base_model=params.base_model, base_model_dir=base_model.path.resolve(), out_dir=out_dir
    )
    version = _find_or_build("datasets", dataset_spec(params.dataset, params.base_model), "tasks.programs.prepare_dataset", request)
    counts = read_record(version.path / MANIFEST_FILE, DatasetManifest)
    get_run_logger().info(
        f"dataset: {counts.num_train} training and {counts.num_eval} held-out problems; left out: {counts.num_dropped} prompts "
        f"above {params.dataset.max_prompt_length} tokens, {counts.num_held_out_in_train} training problems that are held out"
    )
    groups = params.training.total_batch_size // params.training.num_generations
    if counts.num_train < groups:
        raise RefusedInput(
            f"a step takes {groups} prompts (effective batch {params.training.total_batch_size} / num_generations "
            f"{params.training.num_generations}), but the dataset has {counts.num_train}; raise dataset.num_train"
        )
    return DatasetVersion(version=version, num_train=counts.num_train, num_eval=counts.num_eval, num_dropped=counts.num_dropped)


@task(cache_policy=NO_CACHE)
def version_checkpoint(run: RunFolder, done: FinishedAttempt) -> ArtifactVersion:
    """Move the attempt's checkpoint into the store under the run's name and return its hash."""
    folder = done.outcome.checkpoint_dir
    if folder is None:
        raise AttemptFailed(f"{done.attempt.name} succeeded without a checkpoint; see {done.attempt_dir}")
    version = store_folder(STORE_DIR, folder, "checkpoints", run.name)
    get_run_logger().info("checkpoint %s in %s", version.dvc_hash, version.path)
    return version


def _find_or_build(kind: Kind, spec: Spec, module: str, request: BaseModelRequest | DatasetRequest) -> ArtifactVersion:
    """Return the folder whose manifest names `spec`; where there is none, build it and store it. Of two runs that need it, one waits."""
    logger, key = get_run_logger(), input_key(spec)
    lock = STORE_DIR.parent / "building" / f"{kind}-{key}.lock"
    with file_lock(lock, lambda: logger.info("%s: another run is at work on the same one; waiting for it", kind)):
        if found := find_input(PROJECT_DIR, kind, spec, STORE_DIR):
            logger.info("%s: already built, %s (%s)", kind, found.path, found.location)
            return found
        logger.info("%s: no folder has this spec; building it once", kind)
        ask_program(module, request, request.out_dir.parent, logger.info)
        return store_folder(STORE_DIR, request.out_dir, kind, key)
