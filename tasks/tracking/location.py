"""Where MLflow is: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME, or `state/mlflow.db` and "halfstep"."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from tasks.errors import HalfstepError, RefusedInput
from tasks.files import file_lock


def tracking_uri(state_dir: Path) -> str:
    """Return the address in use; the default is absolute, so it does not depend on the working directory.

    Raises:
        RefusedInput: it carries a password, which records and MLflow's own messages would repeat.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{state_dir.resolve() / 'mlflow.db'}"
    if re.search(r"//[^/@\s]*@", uri):
        raise RefusedInput(
            "MLFLOW_TRACKING_URI carries a user or password, which would be written down with every run; "
            "take them out and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    return uri


def experiment_name() -> str:
    """Return the experiment in use."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or "halfstep"


@contextlib.contextmanager
def reaching(uri: str, wish: str) -> Iterator[MlflowClient]:
    """Yield a client of the MLflow at `uri`; its failures become one message.

    Raises:
        HalfstepError: what was asked, what MLflow said, what to do.
    """
    try:
        yield MlflowClient(uri)
    except (MlflowException, OSError) as error:
        remedy = "start that server or correct MLFLOW_TRACKING_URI; unset, the file state/mlflow.db is used"
        raise HalfstepError(f"could not {wish} in MLflow at {uri}: {str(error).strip()[:600]}; {remedy}") from error


def open_experiment(state_dir: Path) -> tuple[MlflowClient, str, str]:
    """Return the client, its address and the experiment's id, creating database and experiment at first use.

    One process at a time: MLflow fails when two create a database at once.
    """
    uri, name = tracking_uri(state_dir), experiment_name()
    with file_lock(state_dir / "mlflow.lock"), reaching(uri, f"open experiment {name!r}") as client:
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            # a server knows its own place for artifacts; for a database it would be ./mlruns of the working directory
            served = uri.startswith(("http://", "https://", "databricks"))
            artifacts = None if served else (state_dir.resolve() / "mlartifacts").as_uri()
            return client, uri, client.create_experiment(name, artifact_location=artifacts)
    if experiment.lifecycle_stage == "deleted":
        raise RefusedInput(f"experiment {name!r} in MLflow at {uri} is deleted; restore it or set MLFLOW_EXPERIMENT_NAME")
    return client, uri, experiment.experiment_id
