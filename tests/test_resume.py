"""Which attempts are left to a run that goes on."""

from pathlib import Path

from tasks.params import Params
from tasks.precision import plan_precision
from tasks.records import FinishedAttempt, Outcome, PrecisionPlan
from tasks.resume import remaining_attempts
from tests.machines import hardware_of

STATE = Path("runs/r/1-baseline-bf16/states/checkpoint-10")


def plan() -> PrecisionPlan:
    return plan_precision(hardware_of("cpu_epyc_9r14"), Params.model_validate({"precision": {"allow_emulated": True}}))


def ended(number: int, status: str, state: Path | None = None) -> FinishedAttempt:
    outcome = Outcome.model_validate({"status": status, "last_state_dir": state})
    return FinishedAttempt(attempt=plan().attempts[number - 1], outcome=outcome, attempt_dir=Path("x"))


def test_a_new_run_makes_the_whole_plan() -> None:
    assert remaining_attempts(plan(), ()) == plan().attempts


def test_a_success_leaves_nothing() -> None:
    assert remaining_attempts(plan(), (ended(1, "out_of_memory"), ended(2, "succeeded"))) == ()


def test_a_shortage_is_not_tried_again() -> None:
    (left,) = remaining_attempts(plan(), (ended(1, "out_of_memory"),))
    assert left == plan().attempts[1]


def test_an_interrupted_attempt_goes_on_from_its_state_in_a_folder_of_its_own() -> None:
    again, retry = remaining_attempts(plan(), (ended(1, "cancelled", STATE),))
    assert (again.name, again.resume_from) == ("1-baseline-bf16-resumed-1", STATE)
    assert "checkpoint-10" in again.reason
    assert again.levers == plan().attempts[0].levers
    assert retry == plan().attempts[1]


def test_an_attempt_without_a_state_starts_anew() -> None:
    again = remaining_attempts(plan(), (ended(1, "cancelled"), ended(1, "failed")))[0]
    assert (again.name, again.resume_from) == ("1-baseline-bf16-resumed-2", None)
