"""One attempt in MLflow. MLflow being away never stops training: what did not arrive follows when the run concludes."""

from collections.abc import Callable
from pathlib import Path

from tasks.errors import HalfstepError
from tasks.files import read_record, write_record
from tasks.records import Attempt, FinishedAttempt, Outcome, TrackedRun
from tasks.tracking.metrics import MetricsSender
from tasks.tracking.runs import close_attempt_run, open_attempt_run

TRACKED_FILE = "tracked.json"
DELIVERED_FILE = ".delivered"
Warn = Callable[[str], None]


class AttemptLog:
    """Opens the attempt's run, sends its metrics while they grow, and closes it; tells `warn` instead of raising."""

    def __init__(self, parent: TrackedRun, attempt: Attempt, attempt_dir: Path, warn: Warn) -> None:
        self._attempt_dir = attempt_dir
        self._warn = warn
        path = attempt_dir / TRACKED_FILE
        try:
            self._run: TrackedRun | None = read_record(path, TrackedRun) if path.is_file() else open_attempt_run(parent, attempt)
        except HalfstepError as error:
            self._run = None
            warn(f"{error}. {attempt.name} goes on; it is logged when the run concludes")
            return
        write_record(path, self._run)
        self._sender = MetricsSender(self._run, attempt_dir / "metrics.jsonl", warn)

    def send(self) -> None:
        """Send what is new."""
        if self._run is not None:
            self._sender.send()

    def close(self, outcome: Outcome, patience_seconds: float) -> None:
        """Send the rest, trying for `patience_seconds`, and close the run; mark the folder if everything arrived."""
        if self._run is None:
            return
        report = self._sender.finish(patience_seconds)
        try:
            close_attempt_run(self._run, outcome, self._attempt_dir)
        except HalfstepError as error:
            self._warn(str(error))
            return
        if report.message:
            self._warn(report.message)
        else:
            (self._attempt_dir / DELIVERED_FILE).touch()


def deliver(parent: TrackedRun, done: FinishedAttempt, warn: Warn) -> None:
    """Log what of an attempt has not reached MLflow yet; MLflow keeps a point that is sent twice once."""
    if not (done.attempt_dir / DELIVERED_FILE).exists():
        AttemptLog(parent, done.attempt, done.attempt_dir, warn).close(done.outcome, patience_seconds=30.0)
