"""What a run does next, from its plan and what came of its attempts so far. Pure."""

from tasks.errors import NothingLearned
from tasks.objectives import WIDER
from tasks.params import Params
from tasks.records import Attempt, FinishedAttempt, MemoryLevers, PrecisionPlan, Status

SHORT = ("out_of_memory", "skipped")


def next_attempt(plan: PrecisionPlan, finished: tuple[FinishedAttempt, ...], params: Params) -> Attempt | None:
    """Return the attempt to make next, fitted to what came before it; None when the run is decided.

    A shortage of memory, met or predicted, leads to the next retry, a divergence to the plan's fallback in a wider precision,
    each begun once. After a divergence nothing runs in a precision that diverged or in a narrower one: a retry then takes the
    fallback's. What was interrupted or failed in an earlier start of the run is made again; what failed in this start is not.
    """
    if not finished:
        return plan.attempts[0]
    last = finished[-1]
    status, number, label = last.outcome.status, last.attempt.number, last.attempt.precision.label
    begun = {done.attempt.number for done in finished}
    diverged = {done.attempt.precision.label for done in finished if done.outcome.status == "diverged"}
    left = [attempt for attempt in plan.attempts if attempt.number not in begun]
    chosen: list[Attempt] = []
    if status in SHORT:
        chosen = [_widened(attempt, last.attempt, diverged) for attempt in left if attempt.label == "retry"]
    elif status == "diverged" and not (last.outcome.failure and last.outcome.failure.error_type == NothingLearned.__name__):
        wider = [attempt for attempt in left if attempt.label == "fallback" and attempt.precision.label in WIDER[label]]
        chosen = [attempt for attempt in wider if attempt.precision.label not in diverged]
    elif status != "succeeded" and last.in_earlier_start:
        chosen = [attempt for attempt in plan.attempts if attempt.number == number]
    return _fitted(chosen[0], finished, params) if chosen else None


def run_status(finished: tuple[FinishedAttempt, ...]) -> Status:
    """Return how a run ended: a divergence counts also when what followed it did not fit in memory."""
    last = finished[-1].outcome.status
    return "diverged" if last in SHORT and any(done.outcome.status == "diverged" for done in finished) else last


def _widened(retry: Attempt, last: Attempt, diverged: set[str]) -> Attempt:
    if all(retry.precision.label in WIDER[label] for label in diverged):
        return retry
    reason = f"{retry.reason}. In {last.precision.label} instead, since the run diverged in {' and '.join(sorted(diverged))}"
    return retry.model_copy(update={"precision": last.precision, "rehearsal": last.rehearsal, "reason": reason})


def _fitted(attempt: Attempt, finished: tuple[FinishedAttempt, ...], params: Params) -> Attempt:
    levers, notes = attempt.levers, [attempt.reason]
    resumption = sum(done.attempt.number == attempt.number for done in finished)
    if attempt.label == "fallback":
        levers = finished[-1].attempt.levers
        source = next(done.attempt for done in reversed(finished) if done.outcome.status == "diverged")
        notes.append(f"{source.name} diverged" + (", whose levers are kept" if levers != attempt.levers else ""))
    elif attempt.label == "retry":
        levers, note = _smaller_rollout(attempt, finished, params)
        notes += note
    state = next((done.outcome.last_state_dir for done in reversed(finished) if done.outcome.last_state_dir), None)
    notes += ["Begun before and not finished"] if resumption else []
    if state:
        notes.append(f"Goes on from the training state {state.name}")
    elif resumption or attempt.label == "fallback":
        notes.append("Starts anew: no training state was saved")
    return attempt.model_copy(update={"levers": levers, "resumption": resumption, "resume_from": state, "reason": ". ".join(notes)})


def _smaller_rollout(attempt: Attempt, finished: tuple[FinishedAttempt, ...], params: Params) -> tuple[MemoryLevers, list[str]]:
    # derived from the plan, never from the last attempt, so that nothing shrinks again and again
    short = [(done.attempt.levers, done.outcome.failure) for done in finished if done.outcome.status in SHORT]
    failed = [_chunk(levers) for levers, failure in short if failure and failure.phase == "rollout"]
    if not failed:
        return attempt.levers, []
    divisor = params.memory.retries[attempt.number - 2].rollout_divisor
    planned, smallest = _chunk(attempt.levers), min(failed)
    chunk = max(1, planned // divisor if planned // divisor < smallest else smallest // divisor)
    stuck = "" if chunk < smallest else f", no smaller than what failed (rollout_divisor {divisor})"
    note = f"A shortage came in the rollout of {smallest} completions at once: rollout chunk {planned} -> {chunk}{stuck}"
    return attempt.levers.model_copy(update={"rollout_batch_size": chunk}), [note]


def _chunk(levers: MemoryLevers) -> int:
    return levers.rollout_batch_size or levers.effective_batch_size
