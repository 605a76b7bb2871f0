"""Send `metrics.jsonl` to MLflow while it grows; every point arrives once, however often the server goes away.

A line is ``{"step": int, "time": unix seconds, "metrics": {name: value}}``. A batch that may or may not have arrived is sent
again: MLflow's stores keep one point for the same name, step, time and value, and the time comes from the line.
"""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from pydantic import Field, ValidationError

from tasks.records import Record, TrackedRun
from tasks.tracking.entities import as_metrics
from tasks.tracking.location import without_passwords

BATCH_SIZE = 1000  # MLflow's limit of one call
logger = logging.getLogger(__name__)


class MetricsLine(Record):
    """One line of `metrics.jsonl`."""

    step: int
    time: float = Field(allow_inf_nan=False)
    metrics: dict[str, float]


class SendReport(Record):
    """What became of a file of metrics."""

    num_sent: int = Field(description="points")
    num_unsent: int = Field(description="points still only in the file")
    num_refused_lines: int = Field(description="whole lines that hold no metrics")
    message: str | None = Field(description="what to tell a person; null when everything arrived")


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[int, MetricsLine | None]]:
    """Yield each whole line from `offset` on, with the offset behind it; None for a line that is malformed."""
    if not path.is_file():
        return
    with path.open("rb") as stream:
        stream.seek(offset)
        for text in stream:
            if not text.endswith(b"\n"):
                return
            offset += len(text)
            try:
                yield offset, MetricsLine.model_validate_json(text)
            except ValidationError:
                yield offset, None


class MetricsSender:
    """Reads what is new in a metrics file and sends it; never raises into the loop that calls it."""

    def __init__(self, run: TrackedRun, path: Path, warn: Callable[[str], None] = logger.warning, retry_seconds: float = 10.0) -> None:
        """Begin at the file's start; `warn` is told once when the server goes away and once when it is back."""
        self._run = run
        self._path = path
        self._warn = warn
        self._retry_seconds = retry_seconds
        self._client = MlflowClient(run.tracking_uri)
        self._shown = without_passwords(run.tracking_uri)
        self._offset = 0
        self._next_try = 0.0
        self._num_sent = 0
        self._refused: set[int] = set()
        self._fault = ""

    def send(self) -> int:
        """Send what is new and return the number of points; after a failure, not again before `retry_seconds`."""
        return self._send_new() if time.monotonic() >= self._next_try else 0

    def finish(self, patience_seconds: float = 60.0) -> SendReport:
        """Send the rest, trying again for `patience_seconds`; what stays unsent stays in the file and is counted."""
        deadline = time.monotonic() + patience_seconds
        self._send_new()
        while self._fault and time.monotonic() < deadline:
            time.sleep(min(1.0, self._retry_seconds))
            self._send_new()
        unsent = sum(len(line.metrics) for _, line in read_lines(self._path, self._offset) if line)
        notes = []
        if unsent:
            notes.append(f"{unsent} points did not reach MLflow at {self._shown} ({self._fault}); they are in {self._path}")
        elif self._path.is_file() and self._path.stat().st_size > self._offset:
            notes.append(f"{self._path} ends in half a line, which was left out")
        if self._refused:
            notes.append(f"{len(self._refused)} lines of {self._path} hold no metrics and were left out")
        return SendReport(
            num_sent=self._num_sent, num_unsent=unsent, num_refused_lines=len(self._refused), message="; ".join(notes) or None
        )

    def _send_new(self) -> int:
        sent_before = self._num_sent
        try:
            while (batch := self._next_batch())[1] > self._offset:
                points, end = batch
                for first in range(0, len(points), BATCH_SIZE):
                    self._client.log_batch(self._run.run_id, metrics=points[first : first + BATCH_SIZE])
                self._offset = end
                self._num_sent += len(points)
                if self._fault:
                    self._warn("MLflow answers again; the points of the meantime are sent")
                    self._fault = ""
        except (MlflowException, OSError) as error:
            self._next_try = time.monotonic() + self._retry_seconds
            fault = without_passwords(str(error).strip()[:300])
            if not self._fault:
                self._warn(f"MLflow at {self._shown} is away; points stay in {self._path} and follow later: {fault}")
            self._fault = fault or type(error).__name__
        return self._num_sent - sent_before

    def _next_batch(self) -> tuple[list[Metric], int]:
        points: list[Metric] = []
        end = self._offset
        for behind, line in read_lines(self._path, self._offset):
            if line is None and behind not in self._refused:
                self._refused.add(behind)
                self._warn(f"a line of {self._path} that ends at byte {behind} holds no metrics and is left out")
            new = as_metrics(line.metrics, round(line.time * 1000), line.step) if line else []
            if points and len(points) + len(new) > BATCH_SIZE:
                break
            points += new
            end = behind
        return points, end
