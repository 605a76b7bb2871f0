"""One attempt in MLflow. MLflow being away never stops training: what did not arrive follows when the run concludes."""

from collections.abc import Callable
from pathlib import Path

from tasks.errors import HalfstepError
from tasks.files import read_record, write_record
from tasks.records import Attempt, FinishedAttempt, Outcome, TrackedRun
from tasks.tracking.metrics import MetricsSender
from tasks.tracking.runs import close_attempt_run, open_attempt_run

DELIVERED_FILE = ".delivered"
Warn = Callable[[str], None]


def remembered_run(folder: Path, open_run: Callable[[], TrackedRun]) -> TrackedRun:
    """Return the MLflow run that a folder stands for: the one of an earlier start, or the one that `open_run` opens."""
    path = folder / "tracked.json"
    if path.is_file():
        return read_record(path, TrackedRun)
    tracked = open_run()
    write_record(path, tracked)
    return tracked


class AttemptLog:
    """Opens the attempt's run, sends its metrics while they grow, and closes it; tells `warn` instead of raising."""

    def __init__(self, parent: TrackedRun, attempt: Attempt, attempt_dir: Path, warn: Warn) -> None:
        self._attempt_dir = attempt_dir
        self._warn = warn
        self._sender: MetricsSender | None = None
        try:
            run = remembered_run(attempt_dir, lambda: open_attempt_run(parent, attempt))
            self._sender = MetricsSender(run, attempt_dir / "metrics.jsonl", warn)
        except HalfstepError as error:
            warn(f"{error}. {attempt.name} goes on; it is logged when the run concludes")

    def send(self) -> None:
        """Send what is new."""
        if self._sender:
            self._sender.send()

    def close(self, outcome: Outcome, patience_seconds: float) -> None:
        """Send the rest, trying for `patience_seconds`, and close the run; mark the folder if everything arrived."""
        if not self._sender:
            return
        missing = self._sender.finish(patience_seconds)
        try:
            close_attempt_run(self._sender.run, outcome, self._attempt_dir)
        except HalfstepError as error:
            missing = str(error)
        if missing:
            self._warn(missing)
        else:
            (self._attempt_dir / DELIVERED_FILE).touch()


def deliver(parent: TrackedRun, done: FinishedAttempt, warn: Warn) -> None:
    """Log what of an attempt has not reached MLflow yet; MLflow keeps a point that is sent twice once."""
    if not (done.attempt_dir / DELIVERED_FILE).exists():
        AttemptLog(parent, done.attempt, done.attempt_dir, warn).close(done.outcome, patience_seconds=30.0)
