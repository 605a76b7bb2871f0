"""Several ranks, one outcome: which rank failed first, told from what each of them wrote. Pure, but for the folders' names.

When one rank fails, the others see its connections close, or wait for it until they are ended: what they then report is a
complaint, not a cause, whatever comes first.
"""

import re
import signal
from pathlib import Path

from pydantic import Field

from tasks.errors import ScorerFailed
from tasks.records import Failure, Outcome, Phase, Record, Status

# what a rank says that waited for another in vain: gloo, NCCL and its watchdog, torch's stores
_COMPLAINT = re.compile(
    r"gloo/|Connection (closed|reset) by peer|Broken pipe|NCCL|ncclRemoteError|Watchdog caught collective|collective operation timeout"
    r"|Timed out waiting \d+ms|wait timeout|Dist(Backend|Network|Store)Error"
)
# of what was first seen at the same look
_FIRST: tuple[Status, ...] = ("out_of_memory", "cancelled", "diverged", "failed")


def ranks_dir(attempt_dir: Path) -> Path:
    """Return where an attempt's ranks meet and leave their files."""
    return attempt_dir / "ranks"


def rank_dir(attempt_dir: Path, rank: int) -> Path:
    """Return the folder of one rank: its outcome.json, and its log but for rank 0."""
    return ranks_dir(attempt_dir) / str(rank)


class RankReport(Record):
    """What one rank left."""

    rank: int
    outcome: Outcome | None
    returncode: int = Field(description="as subprocess says it")
    seen_seconds: float | None = Field(description="when its outcome or its end was first seen; null: not before it was ended")
    log_tail: str = ""
    phase: Phase | None = Field(default=None, description="in which it was last")

    @property
    def status(self) -> Status:
        """Return how it ended; without an outcome, failed unless by SIGTERM."""
        ended_by_sigterm = self.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
        return self.outcome.status if self.outcome else "cancelled" if ended_by_sigterm else "failed"

    @property
    def complains(self) -> bool:
        """Return whether it failed only because another rank no longer answered."""
        if self.status != "failed":
            return False
        if self.outcome is None:
            return self.returncode != -signal.SIGKILL and _COMPLAINT.search(self.log_tail) is not None
        failure = self.outcome.failure
        # a scorer may have connections of its own
        if failure is None or failure.error_type == ScorerFailed.__name__:
            return False
        return _COMPLAINT.search(f"{failure.error_type}: {failure.message}") is not None


def first_cause(reports: list[RankReport]) -> RankReport | None:
    """Return the rank that made the attempt fail; None if none did.

    The first that failed by itself; if the others only complain, the one that said nothing before it was ended.
    """
    failed = [report for report in reports if report.seen_seconds is not None and report.status != "succeeded"]
    silent = [report for report in reports if report.seen_seconds is None]
    causes = [report for report in failed if not report.complains] or (silent if failed else []) or failed
    return min(causes, key=lambda report: (report.seen_seconds or 0.0, _FIRST.index(report.status), report.rank), default=None)


def merged_outcome(reports: list[RankReport], unfinished: Outcome, *, stopped: bool) -> Outcome:
    """Return the attempt's outcome: that of the rank that failed first, otherwise rank 0's; cancelled if it was `stopped`.

    `unfinished` is the outcome of an attempt that left none. Each rank's peak is kept, and the largest is the attempt's.
    """
    cause, first = first_cause(reports), reports[0].outcome
    sizes = tuple((report.outcome and report.outcome.peak_memory_bytes) or 0 for report in reports)
    if all(report.status == "succeeded" for report in reports) and first:
        merged = first
    elif stopped and (cause is None or cause.complains or cause.seen_seconds is None or cause.status == "cancelled"):
        merged = (first or unfinished).model_copy(update={"status": "cancelled", "shortage": None, "failure": None})
    elif cause:
        merged = _of_cause(cause, reports, unfinished)
    else:
        merged = unfinished
    own = {"last_state_dir": unfinished.last_state_dir, "checkpoint_dir": first and first.checkpoint_dir}
    return merged.model_copy(update={**own, "peak_memory_bytes": max(sizes) or None, "peak_memory_by_device": sizes})


def _of_cause(cause: RankReport, reports: list[RankReport], unfinished: Outcome) -> Outcome:
    failures = [report.outcome.failure if report.outcome else None for report in reports]
    said, rank = failures[cause.rank], cause.rank
    if cause.seen_seconds is None:
        waited = next((failure.message for failure in failures if failure and failure is not said), "no time is left")
        found = f"rank {rank} did not answer, and was ended; the others waited for it: {waited}"
        return unfinished.model_copy(
            update={"status": "failed", "failure": Failure(phase=cause.phase, error_type="RankSilent", message=found, rank=rank)}
        )
    if cause.outcome is None:
        how = f"signal {-cause.returncode}" if cause.returncode < 0 else f"exit code {cause.returncode}"
        died = Failure(phase=cause.phase, error_type="ProcessDied", message=f"rank {rank} ended by {how} without an outcome", rank=rank)
        return unfinished.model_copy(update={"status": cause.status, "failure": died})
    alike = all(other and said and (other.error_type, other.message) == (said.error_type, said.message) for other in failures)
    if said is None or alike:
        return cause.outcome
    named = said.model_copy(update={"message": f"rank {rank}: {said.message}", "rank": rank})
    return cause.outcome.model_copy(update={"failure": named})
