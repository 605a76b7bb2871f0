"""What a run does next, from its plan and what came of its attempts so far. Pure."""

from itertools import takewhile
from pathlib import Path

from tasks.errors import NothingLearned
from tasks.objectives import WIDER
from tasks.params import Params
from tasks.records import Attempt, FinishedAttempt, MemoryLevers, PrecisionPlan, Status

SHORT = ("out_of_memory", "skipped")
# where host memory is the device's too, so that levers free it
SHARED_MEMORY = ("cpu", "mps")
MAX_PREEMPTIONS = 3


def next_attempt(plan: PrecisionPlan, finished: tuple[FinishedAttempt, ...], params: Params) -> Attempt | None:
    """Return the attempt to make next, fitted to what came before it; None when the run is decided.

    A shortage of memory, met or predicted, leads to the next retry, a divergence to the plan's fallback in a wider precision,
    each begun once. After a divergence nothing runs in a precision that diverged or in a narrower one: a retry then takes the
    fallback's. Fragmented memory leads to the same attempt with a compact allocator, once; a shortage of host memory that no
    lever frees to nothing. What was ended from outside goes on, `MAX_PREEMPTIONS` times without a new training state in between.
    What was interrupted or failed in an earlier start of the run is made again; what failed in this start is not. What was skipped in
    an earlier start is decided anew, and where a shortage left nothing to try, the last attempt is made again: what is available, and
    what a resume may set, can have changed since.
    """
    tried = tuple(done for done in finished if not _predicted_before(done))
    if not tried:
        return _fitted(plan.attempts[0], finished, params) if finished else plan.attempts[0]
    last = tried[-1]
    status, label = last.outcome.status, last.attempt.precision.label
    begun = {_place(done.attempt) for done in tried}
    diverged = {done.attempt.precision.label for done in tried if done.outcome.status == "diverged"}
    same = [_widened(attempt, last.attempt, diverged) for attempt in plan.attempts if _place(attempt) == _place(last.attempt)]
    # a resume may have taken the retry away
    again = same or [attempt for attempt in plan.attempts if (attempt.label == "fallback") == bool(diverged)][-1:]
    left = [attempt for attempt in plan.attempts if _place(attempt) not in begun]
    chosen: list[Attempt] = []
    if status in SHORT:
        answered = last.outcome.shortage != "host" or plan.device_type in SHARED_MEMORY
        retries = [_widened(attempt, last.attempt, diverged) for attempt in left if attempt.label == "retry" and answered]
        chosen = same if _only_fragmented(last) else retries or (again if last.in_earlier_start else [])
    elif status == "diverged" and not (last.outcome.failure and last.outcome.failure.error_type == NothingLearned.__name__):
        wider = [attempt for attempt in left if attempt.label == "fallback" and attempt.precision.label in WIDER[label]]
        chosen = [attempt for attempt in wider if attempt.precision.label not in diverged]
    elif status != "succeeded" and (last.in_earlier_start or 0 < preemptions(tried) <= MAX_PREEMPTIONS):
        chosen = again
    return _fitted(chosen[0], finished, params) if chosen else None


def preemptions(finished: tuple[FinishedAttempt, ...]) -> int:
    """Return how often the last attempt was ended from outside in this start of the run, since its newest training state."""
    last = (finished[-1].attempt.number, "cancelled", finished[-1].outcome.last_state_dir, False)
    ends = ((done.attempt.number, done.outcome.status, done.outcome.last_state_dir, done.in_earlier_start) for done in reversed(finished))
    return len(list(takewhile(lambda end: end == last, ends)))


def _place(attempt: Attempt) -> tuple[str, int | str]:
    # a resume may set more or fewer retries, after which fallbacks have other numbers
    return attempt.label, attempt.precision.label if attempt.label == "fallback" else attempt.number


def _only_fragmented(done: FinishedAttempt) -> bool:
    return done.outcome.shortage == "fragmentation" and not done.attempt.levers.compact_allocator


def run_status(finished: tuple[FinishedAttempt, ...]) -> Status:
    """Return how a run ended: a divergence counts also when what followed did not fit, a stop from outside as a failure."""
    last = finished[-1].outcome.status
    if last in SHORT and any(done.outcome.status == "diverged" for done in finished):
        return "diverged"
    return "failed" if last == "cancelled" else last


def _predicted_before(done: FinishedAttempt) -> bool:
    return done.in_earlier_start and done.outcome.status == "skipped"


def _widened(retry: Attempt, last: Attempt, diverged: set[str]) -> Attempt:
    if retry.label != "retry" or all(retry.precision.label in WIDER[label] for label in diverged):
        return retry
    reason = f"{retry.reason}. In {last.precision.label} instead, since the run diverged in {' and '.join(sorted(diverged))}"
    return retry.model_copy(update={"precision": last.precision, "rehearsal": last.rehearsal, "reason": reason})


def _fitted(attempt: Attempt, finished: tuple[FinishedAttempt, ...], params: Params) -> Attempt:
    levers, notes = attempt.levers, [attempt.reason]
    before = [done for done in finished if _place(done.attempt) == _place(attempt)]
    finished = tuple(done for done in finished if not _predicted_before(done))
    if attempt.label == "fallback":
        levers = finished[-1].attempt.levers
        source = next(done.attempt for done in reversed(finished) if done.outcome.status == "diverged")
        notes.append(f"{source.name} diverged" + (", whose levers are kept" if levers != attempt.levers else ""))
    elif attempt.label == "retry":
        levers, smaller = _smaller_rollout(attempt, finished, params)
        notes += smaller
    if not levers.compact_allocator and any(_only_fragmented(done) for done in finished):
        levers = levers.model_copy(update={"compact_allocator": True})
        notes.append("Memory was fragmented: compact allocator off -> on")
    if before and _predicted_before(before[-1]):
        notes.append("Skipped in an earlier start of the run, and decided anew by what is available now")
    elif times := preemptions(finished) if before else 0:
        notes.append(f"Ended from outside by SIGTERM, which the run did not ask for ({times} of at most {MAX_PREEMPTIONS} in a row)")
    elif before:
        notes.append("Begun before and not finished")
    state, note = _state_for(levers, finished)
    if not note and (before or attempt.label == "fallback"):
        note = "Starts anew: no training state was saved"
    notes += [note] if note else []
    return attempt.model_copy(update={"levers": levers, "resumption": len(before), "resume_from": state, "reason": ". ".join(notes)})


def _state_for(levers: MemoryLevers, finished: tuple[FinishedAttempt, ...]) -> tuple[Path | None, str]:
    # full weights do not fit into adapters, nor the other way round
    made = [done for done in finished if done.outcome.last_state_dir]
    fitting = [done for done in made if done.attempt.levers.lora_rank == levers.lora_rank]
    if state := fitting[-1].outcome.last_state_dir if fitting else None:
        maker = next(done.attempt for done in fitting if done.outcome.last_state_dir == state)
        anew = levers.optimizer_8bit != maker.levers.optimizer_8bit
        return state, f"Goes on from the training state {state.name}" + (", the optimizer's states begin anew" if anew else "")
    if not made:
        return None, ""
    held, wanted = (f"LoRA rank {rank}" if rank else "all weights" for rank in (made[-1].attempt.levers.lora_rank, levers.lora_rank))
    return None, f"Starts anew: the training state in hand is of {held}, and this attempt trains {wanted}"


def _smaller_rollout(attempt: Attempt, finished: tuple[FinishedAttempt, ...], params: Params) -> tuple[MemoryLevers, list[str]]:
    # derived from the plan, never from the last attempt, so that nothing shrinks again and again
    short = [done for done in finished if done.outcome.status in SHORT and not _only_fragmented(done)]
    failed = [_chunk(done.attempt.levers) for done in short if done.outcome.failure and done.outcome.failure.phase == "rollout"]
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
