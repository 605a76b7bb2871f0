"""Several ranks, one outcome: who is named, in whichever order the ranks were heard (case M7)."""

from itertools import permutations

import pytest

from tasks.memory import MB
from tasks.rank_outcomes import RankReport, merged_outcome
from tasks.records import Failure, Outcome

UNFINISHED = Outcome(
    status="cancelled", steps_done=4, total_steps=9, failure=Failure(phase=None, error_type="ProcessDied", message="left no outcome")
)
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3772"
WAITED = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
NCCL_SHORT = "NCCL error: unhandled cuda error. Failed to CUDA calloc async 608 bytes"


def said(status: str, error_type: str = "RuntimeError", message: str = "", peak_mb: int = 10) -> Outcome:
    failure = None if status in ("succeeded", "cancelled") else Failure(phase="forward", error_type=error_type, message=message)
    return Outcome.model_validate({"status": status, "peak_memory_bytes": peak_mb * MB, "steps_done": 5, "failure": failure})


def report(rank: int, outcome: Outcome | None, seen: float | None, returncode: int = 1, log_tail: str = "") -> RankReport:
    return RankReport(rank=rank, outcome=outcome, returncode=returncode, seen_seconds=seen, log_tail=log_tail)


SHORT = said("out_of_memory", message="can't allocate memory")
CLOSED_PEER, TIMED_OUT = said("failed", message=CLOSED), said("failed", message=WAITED)
SCORER = said("failed", "ScorerFailed", "Connection reset by peer")
WATCHDOG = "[rank0]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"


@pytest.mark.parametrize(
    ("case", "ranks", "expected"),
    [
        ("short, the others complain first", [(CLOSED_PEER, 1.0, 1), (SHORT, 2.0, 1), (CLOSED_PEER, 1.0, 1)], ("out_of_memory", 1)),
        ("short of memory for NCCL", [(said("out_of_memory", message=NCCL_SHORT), 2.0, 1), (CLOSED_PEER, 1.0, 1)], ("out_of_memory", 0)),
        ("killed, the others complain first", [(CLOSED_PEER, 1.0, 1), (None, 2.0, -9)], ("failed", 1)),
        ("gone without a word", [(CLOSED_PEER, 1.0, 1), (None, 2.0, 0)], ("failed", 1)),
        ("the first of two that failed by themselves", [(SHORT, 2.0, 1), (said("diverged", "Diverged"), 1.0, 1)], ("diverged", 1)),
        ("at one look a shortage before the rest", [(None, 1.0, -9), (SHORT, 1.0, 1)], ("out_of_memory", 1)),
        ("silent while the other timed out", [(TIMED_OUT, 1800.0, 1), (None, None, -9)], ("failed", 1)),
        ("silent, said so when ended", [(TIMED_OUT, 1800.0, 1), (said("cancelled"), None, 1)], ("failed", 1)),
        ("all wait", [(TIMED_OUT, 1800.2, 1), (said("failed", message=WAITED + " too"), 1800.1, 1)], ("failed", 1)),
        ("rank 0 alone saves, and fails", [(said("failed", "OSError", "disk full"), 5.0, 1), (said("succeeded"), 1.0, 0)], ("failed", 0)),
        ("a scorer's own connection", [(CLOSED_PEER, 1.0, 1), (SCORER, 1.1, 1)], ("failed", 1)),
        ("one rank ended from outside", [(CLOSED_PEER, 1.0, 1), (said("cancelled"), 1.1, 1)], ("cancelled", None)),
        ("all alike", [(said("failed", "RefusedInput", "no"), 1.0, 2), (said("failed", "RefusedInput", "no"), 1.1, 2)], ("failed", None)),
    ],
)  # fmt: skip
def test_the_rank_that_failed_first_is_named_whatever_its_number(
    case: str, ranks: list[tuple[Outcome | None, float | None, int]], expected: tuple[str, int | None]
) -> None:
    for order in permutations(range(len(ranks))):
        reports = [report(rank, *ranks[which]) for rank, which in enumerate(order)]
        merged = merged_outcome(reports, UNFINISHED, stopped=False)
        rank = merged.failure.rank if merged.failure else None
        assert (merged.status, rank) == (expected[0], None if expected[1] is None else order.index(expected[1])), case
        if merged.failure and rank is not None:
            assert f"rank {rank}" in merged.failure.message


def test_ranks_that_nccls_watchdog_ended_only_complain() -> None:
    merged = merged_outcome([report(0, None, 1800.0, -6, WATCHDOG), report(1, None, None, -9)], UNFINISHED, stopped=False)
    assert merged.failure is not None and (merged.failure.rank, merged.failure.error_type) == (1, "RankSilent")


def test_a_stop_is_no_failure_unless_one_came_before_it() -> None:
    ended = [report(0, None, None, -9), report(1, said("cancelled"), None)]
    merged = merged_outcome(ended, UNFINISHED, stopped=True)
    assert (merged.status, merged.failure, merged.steps_done) == ("cancelled", None, 4)
    complaint = merged_outcome([report(0, CLOSED_PEER, 1.0), report(1, said("cancelled"), 1.1)], UNFINISHED, stopped=True)
    assert (complaint.status, complaint.failure) == ("cancelled", None)
    before = merged_outcome([report(0, SHORT, 1.0), report(1, said("cancelled"), None)], UNFINISHED, stopped=True)
    assert before.status == "out_of_memory" and before.failure is not None and before.failure.rank == 0
    done = merged_outcome([report(0, said("succeeded"), 1.0, 0), report(1, said("succeeded"), None, 0)], UNFINISHED, stopped=True)
    assert done.status == "succeeded"


def test_the_largest_peak_counts_and_each_is_kept() -> None:
    merged = merged_outcome(
        [report(0, said("succeeded", peak_mb=3), 1.0, 0), report(1, said("succeeded", peak_mb=7), 1.0, 0)], UNFINISHED, stopped=False
    )
    assert (merged.peak_memory_bytes, merged.peak_memory_by_device) == (7 * MB, (3 * MB, 7 * MB))
    assert merged_outcome([report(0, None, 1.0, -9), report(1, None, 1.0, -9)], UNFINISHED, stopped=False).peak_memory_bytes is None
