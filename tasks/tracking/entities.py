"""Params, tags and metrics as MLflow accepts them: names, lengths, calls of at most so many, no infinities."""

import math
import re
import time
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from pydantic import Field

from tasks.records import Record

MAX_PARAM_LENGTH, MAX_TAG_LENGTH, MAX_PARAMS_PER_CALL, MAX_METRICS_PER_CALL = 6000, 8000, 100, 1000


class MetricsLine(Record):
    """One line of `metrics.jsonl`."""

    step: int
    time: float = Field(allow_inf_nan=False, description="unix seconds")
    metrics: dict[str, float]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return dotted keys; items of a list are numbered, an empty section or list stays as '{}' or '[]'."""
    rows: dict[str, object] = {}
    for key, value in tree.items():
        items = value if isinstance(value, dict) else {str(i): item for i, item in enumerate(value)} if isinstance(value, list) else None
        rows |= flatten(items, f"{prefix}{key}.") if items else {f"{prefix}{key}": value}
    return rows


def entity_name(name: str) -> str:
    """Return a name as MLflow accepts it."""
    return re.sub(r"[^\w\-./: ]", "_", name)[:250]


def as_metrics(values: Mapping[str, float], milliseconds: int, step: int) -> list[Metric]:
    """Return MLflow's metrics; a value that is not finite becomes `<name>_nonfinite` = 1, since MLflow would chart inf as 1.8e308."""
    shown = {name: value for name, value in values.items() if math.isfinite(value)}
    shown |= {f"{name}_nonfinite": 1.0 for name in values if name not in shown}
    return [Metric(entity_name(name), value, milliseconds, step) for name, value in shown.items()]


def fit(value: object, limit: int) -> str:
    """Return a value as text; one that is too long is cut where a reader sees it."""
    text = str(value)
    note = f" ... (cut here; {len(text)} characters, whole in the artifacts)"
    return text if len(text) <= limit else text[: limit - len(note)] + note


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, object]) -> None:
    """Log params, however many."""
    rows = [Param(entity_name(key), fit(value, MAX_PARAM_LENGTH)) for key, value in params.items()]
    for first in range(0, len(rows), MAX_PARAMS_PER_CALL):
        client.log_batch(run_id, params=rows[first : first + MAX_PARAMS_PER_CALL])


def log_values(client: MlflowClient, run_id: str, tags: Mapping[str, object], metrics: Mapping[str, float | None], step: int = 0) -> None:
    """Log the tags and metrics that have a value, the metrics at the time of the call."""
    known = {name: float(value) for name, value in metrics.items() if value is not None}
    texts = [RunTag(key, fit(value, MAX_TAG_LENGTH)) for key, value in tags.items() if value is not None]
    client.log_batch(run_id, metrics=as_metrics(known, round(time.time() * 1000), step), tags=texts)
