"""One attempt in MLflow: every point of `metrics.jsonl` arrives once, however often the server goes away.

MLflow being away never stops training: what did not arrive follows when the run concludes. A batch that may or may not have
arrived is sent again: MLflow's stores keep one point for the same name, step, time and value, and the time comes from the line.
"""

import time
from collections.abc import Callable
from pathlib import Path

from tasks.attempt_files import METRICS_FILE, new_steps
from tasks.errors import HalfstepError
from tasks.files import GrowingFile
from tasks.records import Attempt, FinishedAttempt, Outcome, TrackedRun
from tasks.tracking.runs import close_attempt_run, log_steps, open_attempt_run

DELIVERED_FILE = ".delivered"
Warn = Callable[[str], None]


class AttemptLog:
    """Opens the attempt's run, sends its metrics while they grow, and closes it; tells `warn` instead of raising."""

    def __init__(self, parent: TrackedRun, attempt: Attempt, attempt_dir: Path, warn: Warn, retry_seconds: float = 10.0) -> None:
        """Begin at the file's start; `warn` is told once when the server goes away and once when it is back."""
        self._attempt, self._attempt_dir = attempt, attempt_dir
        self._warn = warn
        self._retry_seconds = retry_seconds
        self._file = GrowingFile(attempt_dir / METRICS_FILE)
        self._next_try = 0.0
        self._fault = ""
        self.pending: list[dict[str, float]] = []
        self.run: TrackedRun | None = None
        try:
            self.run = open_attempt_run(parent, attempt)
        except HalfstepError as error:
            warn(f"{error}. {attempt.name} goes on; it is logged when the run concludes")

    def send(self) -> None:
        """Send what is new; after a failure, not again before `retry_seconds`."""
        if self.run and time.monotonic() >= self._next_try:
            self._send_new(self.run)

    def close(self, outcome: Outcome, patience_seconds: float) -> None:
        """Send the rest, trying for `patience_seconds`, and close the run; mark the folder if everything arrived."""
        if not self.run:
            return
        missing = self.finish(self.run, patience_seconds)
        try:
            close_attempt_run(self.run, FinishedAttempt(attempt=self._attempt, outcome=outcome, attempt_dir=self._attempt_dir))
        except HalfstepError as error:
            missing = str(error)
        if missing:
            self._warn(missing)
        else:
            (self._attempt_dir / DELIVERED_FILE).touch()

    def finish(self, run: TrackedRun, patience_seconds: float) -> str:
        """Send the rest, trying again for `patience_seconds`, and return what a person must know; '' if everything arrived."""
        deadline = time.monotonic() + patience_seconds
        self._send_new(run)
        while self.pending and time.monotonic() < deadline:
            time.sleep(min(1.0, self._retry_seconds))
            self._send_new(run)
        lost = f"{len(self.pending)} steps did not reach MLflow at {run.tracking_uri} ({self._fault}); they are in {self._file.path}"
        return lost if self.pending else ""

    def _send_new(self, run: TrackedRun) -> None:
        self.pending += new_steps(self._file)
        if not self.pending:
            return
        try:
            log_steps(run, self.pending)
            self.pending.clear()
            if self._fault:
                self._warn("MLflow answers again; the points of the meantime are sent")
                self._fault = ""
        except HalfstepError as error:
            self._next_try = time.monotonic() + self._retry_seconds
            if not self._fault:
                self._warn(f"MLflow is away; points stay in {self._file.path} and follow later: {error}")
            self._fault = str(error)


def deliver(parent: TrackedRun, done: FinishedAttempt, warn: Warn) -> None:
    """Log what of an attempt has not reached MLflow yet; MLflow keeps a point that is sent twice once."""
    if not (done.attempt_dir / DELIVERED_FILE).exists():
        AttemptLog(parent, done.attempt, done.attempt_dir, warn).close(done.outcome, patience_seconds=30.0)
