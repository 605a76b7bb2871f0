"""Send `metrics.jsonl` to MLflow while it grows; every point arrives once, however often the server goes away.

A line is ``{"step": int, "time": unix seconds, "metrics": {name: value}}``. A batch that may or may not have arrived is sent
again: MLflow's stores keep one point for the same name, step, time and value, and the time comes from the line.
"""

import time
from collections.abc import Callable
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from pydantic import Field, ValidationError

from tasks.records import Record, TrackedRun
from tasks.tracking.entities import as_metrics
from tasks.tracking.location import without_passwords

BATCH_SIZE = 1000  # MLflow's limit of one call


class MetricsLine(Record):
    """One line of `metrics.jsonl`."""

    step: int
    time: float = Field(allow_inf_nan=False)
    metrics: dict[str, float]


class MetricsSender:
    """Reads what is new in a metrics file and sends it; never raises into the loop that calls it."""

    def __init__(self, run: TrackedRun, path: Path, warn: Callable[[str], None], retry_seconds: float = 10.0) -> None:
        """Begin at the file's start; `warn` is told once when the server goes away and once when it is back."""
        self.run = run
        self._path = path
        self._warn = warn
        self._retry_seconds = retry_seconds
        self._client = MlflowClient(run.tracking_uri)
        self._offset = 0
        self._next_try = 0.0
        self._fault = ""
        self.pending: list[Metric] = []
        self.num_sent = 0
        self.num_refused_lines = 0

    def send(self) -> int:
        """Send what is new and return the number of points; after a failure, not again before `retry_seconds`."""
        return self._send_new() if time.monotonic() >= self._next_try else 0

    def finish(self, patience_seconds: float = 60.0) -> str:
        """Send the rest, trying again for `patience_seconds`, and return what a person must know; '' if everything arrived."""
        deadline = time.monotonic() + patience_seconds
        self._send_new()
        while self.pending and time.monotonic() < deadline:
            time.sleep(min(1.0, self._retry_seconds))
            self._send_new()
        notes = []
        if self.pending:
            missing = f"{len(self.pending)} points did not reach MLflow at {self.run.tracking_uri}"
            notes.append(f"{missing} ({self._fault}); they are in {self._path}")
        if self._path.is_file() and self._path.stat().st_size > self._offset:
            notes.append(f"{self._path} ends in half a line, which was left out")
        if self.num_refused_lines:
            notes.append(f"{self.num_refused_lines} lines of {self._path} hold no metrics and were left out")
        return "; ".join(notes)

    def _send_new(self) -> int:
        sent_before = self.num_sent
        self._read_new()
        try:
            while batch := self.pending[:BATCH_SIZE]:
                self._client.log_batch(self.run.run_id, metrics=batch)
                del self.pending[:BATCH_SIZE]
                self.num_sent += len(batch)
                if self._fault:
                    self._warn("MLflow answers again; the points of the meantime are sent")
                    self._fault = ""
        except (MlflowException, OSError) as error:
            self._next_try = time.monotonic() + self._retry_seconds
            fault = without_passwords(str(error).strip()[:300])
            if not self._fault:
                self._warn(f"MLflow at {self.run.tracking_uri} is away; points stay in {self._path} and follow later: {fault}")
            self._fault = fault or type(error).__name__
        return self.num_sent - sent_before

    def _read_new(self) -> None:
        if not self._path.is_file():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            for text in stream:
                if not text.endswith(b"\n"):
                    return
                self._offset += len(text)
                try:
                    line = MetricsLine.model_validate_json(text)
                except ValidationError:
                    self.num_refused_lines += 1
                    self._warn(f"a line of {self._path} that ends at byte {self._offset} holds no metrics and is left out")
                else:
                    self.pending += as_metrics(line.metrics, round(line.time * 1000), line.step)
