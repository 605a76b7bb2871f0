"""Version the trained checkpoint in the DVC store."""

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.errors import AttemptFailed
from tasks.places import STORE_DIR
from tasks.records import ArtifactVersion, FinishedAttempt, RunFolder
from tasks.versioning.store import store_folder


@task(cache_policy=NO_CACHE)
def version_checkpoint(run: RunFolder, done: FinishedAttempt) -> ArtifactVersion:
    """Move the attempt's checkpoint into the store under the run's name and return its hash."""
    folder = done.outcome.checkpoint_dir
    if folder is None:
        raise AttemptFailed(f"{done.attempt.name} succeeded without a checkpoint; see {done.attempt_dir}")
    version = store_folder(STORE_DIR, folder, "checkpoints", run.name)
    get_run_logger().info("checkpoint %s in %s", version.dvc_hash, version.path)
    return version
