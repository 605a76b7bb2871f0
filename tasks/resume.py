"""Which attempts are left to a run that goes on. Pure."""

from tasks.records import Attempt, FinishedAttempt, PrecisionPlan


def remaining_attempts(plan: PrecisionPlan, earlier: tuple[FinishedAttempt, ...]) -> tuple[Attempt, ...]:
    """Return the plan's attempts less those already decided: a success ends the plan, a shortage of memory rules one out.

    An attempt that was interrupted or failed is made again, from its last training state, in a folder of its own.
    """
    if any(done.outcome.status == "succeeded" for done in earlier):
        return ()
    short = {done.attempt.number for done in earlier if done.outcome.status == "out_of_memory"}
    left = [attempt for attempt in plan.attempts if attempt.number not in short]
    return tuple(_again(attempt, earlier) for attempt in left)


def _again(attempt: Attempt, earlier: tuple[FinishedAttempt, ...]) -> Attempt:
    before = [done for done in earlier if done.attempt.number == attempt.number]
    if not before:
        return attempt
    state = before[-1].outcome.last_state_dir
    start = f"goes on from the training state {state.name}" if state else "starts anew: no training state was saved"
    return attempt.model_copy(
        update={"resumption": len(before), "resume_from": state, "reason": f"{attempt.reason}. Interrupted before, {start}"}
    )
