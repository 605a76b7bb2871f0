"""Params, tags and metrics as MLflow accepts them: names, no infinities. It cuts long values and divides large batches itself."""

import math
import re
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag


def entity_name(name: str) -> str:
    """Return a name as MLflow accepts it."""
    return re.sub(r"[^\w\-./: ]", "_", name)[:250]


def as_metrics(values: Mapping[str, float], milliseconds: int, step: int) -> list[Metric]:
    """Return MLflow's metrics; a value that is not finite becomes `<name>_nonfinite` = 1, since MLflow would chart inf as 1.8e308."""
    shown = {name: value for name, value in values.items() if math.isfinite(value)}
    shown |= {f"{name}_nonfinite": 1.0 for name in values if name not in shown}
    return [Metric(entity_name(name), value, milliseconds, step) for name, value in shown.items()]


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, object]) -> None:
    """Log params."""
    client.log_batch(run_id, params=[Param(entity_name(key), str(value)) for key, value in params.items()])


def log_values(client: MlflowClient, run_id: str, tags: Mapping[str, object], metrics: Mapping[str, float | None], step: int = 0) -> None:
    """Log the tags and metrics that have a value, the metrics at the time of the call."""
    known = {name: float(value) for name, value in metrics.items() if value is not None}
    texts = [RunTag(key, str(value)) for key, value in tags.items() if value is not None]
    client.log_batch(run_id, metrics=as_metrics(known, round(time.time() * 1000), step), tags=texts)
