"""What comes next after each end of an attempt, in a new run and in one that goes on."""

from itertools import product
from pathlib import Path

from tasks.next_attempt import next_attempt, preemptions, run_status
from tasks.params import Params
from tasks.precision import plan_precision
from tasks.records import Attempt, Failure, FinishedAttempt, Outcome, PrecisionPlan
from tests.machines import NAMES, UNUSABLE, hardware_of

STATE = Path("runs/r/1-baseline-bf16/states/checkpoint-10")


def params_with(retries: list[dict[str, object]] | None = None, rollout: int | None = None, **precision: object) -> Params:
    memory = {} if retries is None else {"retries": retries}
    return Params.model_validate({"precision": precision, "memory": memory, "training": {"rollout_batch_size": rollout}})


def plan(machine: str = "cpu_epyc_9r14", params: Params | None = None) -> PrecisionPlan:
    return plan_precision(hardware_of(machine), params or params_with(allow_emulated=True))


def ended(
    attempt: Attempt, status: str, state: Path | None = None, phase: str | None = None, earlier: bool = False, kind: str | None = None
) -> FinishedAttempt:
    failure = None if phase is None else Failure(phase=phase, error_type="OutOfMemoryError", message="no memory")
    seen = {"status": status, "last_state_dir": state or attempt.resume_from, "failure": failure, "shortage": kind}
    outcome = Outcome.model_validate(seen)
    return FinishedAttempt(attempt=attempt, outcome=outcome, attempt_dir=Path("x"), in_earlier_start=earlier)


def after(made: PrecisionPlan, params: Params, *ends: str) -> Attempt | None:
    """Play the run: each attempt that comes ends as the next word of `ends` says ('rollout' is a shortage there)."""
    finished: tuple[FinishedAttempt, ...] = ()
    for end in ends:
        attempt = next_attempt(made, finished, params)
        assert attempt, end
        status, phase = ("out_of_memory", end) if end in ("rollout", "backward") else (end, None)
        finished = (*finished, ended(attempt, status, Path(f"states/checkpoint-{len(finished) + 1}"), phase))
    return next_attempt(made, finished, params)


def test_a_new_run_begins_with_the_baseline_as_planned() -> None:
    assert next_attempt(plan(), (), params_with()) == plan().attempts[0]


def test_a_success_and_a_failure_of_now_end_the_run() -> None:
    for status in ("succeeded", "failed", "diverged"):
        assert after(plan(), params_with(), status) is None
    assert after(plan(), params_with(), "backward", "succeeded") is None
    for second in ("backward", "skipped"):
        assert after(plan(), params_with(), "backward", second) is None


def test_a_shortage_that_was_predicted_is_answered_like_one_that_was_met() -> None:
    assert after(plan("mi300x"), params_with(), "skipped") == after(
        plan("mi300x"),
        params_with(),
        "backward",
    )


def test_a_shortage_elsewhere_leaves_the_rollout_alone() -> None:
    first, second = plan("mi300x").attempts
    for phase in ("backward", None):
        assert next_attempt(plan("mi300x"), (ended(first, "out_of_memory", None, phase),), params_with()) == second


def test_a_shortage_in_the_rollout_shrinks_its_chunk_and_the_attempt_goes_on_from_the_last_state() -> None:
    planned = plan("mi300x").attempts[1]
    retry = after(plan("mi300x"), params_with(), "rollout")
    assert retry
    assert retry.levers.rollout_batch_size == 16
    assert retry.levers.effective_batch_size == 32
    assert retry.resume_from == Path("states/checkpoint-1")
    assert retry.reason.startswith(planned.reason)
    assert "rollout chunk 32 -> 16" in retry.reason and "checkpoint-1" in retry.reason


def test_several_shortages_keep_what_was_learnt_and_derive_from_the_plan() -> None:
    params = params_with([{}, {"rollout_divisor": 4}, {"rollout_divisor": 1}], rollout=24)
    made = plan("mi300x", params)
    chunks = [
        attempt.levers.rollout_batch_size
        for ends in (["rollout"], ["rollout", "backward"], ["rollout", "backward", "rollout"])
        if (attempt := after(made, params, *ends))
    ]
    assert chunks == [12, 6, 6]
    fourth = after(made, params, "rollout", "backward", "rollout")
    assert fourth and fourth.number == 4 and "no smaller than what failed" in fourth.reason


def test_the_same_divisor_after_a_second_shortage_in_the_rollout_still_shrinks() -> None:
    params = params_with([{}, {}], rollout=4)
    made = plan("mi300x", params)
    for ends, chunk in ((["rollout"], 2), (["rollout", "rollout"], 1)):
        attempt = after(made, params, *ends)
        assert attempt and attempt.levers.rollout_batch_size == chunk


def test_a_divergence_goes_on_in_a_wider_precision_from_the_last_state() -> None:
    params = params_with(mode="fp16", on_divergence="next")
    made = plan("mi300x", params)
    second, third = after(made, params, "diverged"), after(made, params, "diverged", "diverged")
    assert second and third
    assert (second.name, second.resume_from) == ("3-fallback-bf16", Path("states/checkpoint-1"))
    assert "1-baseline-fp16 diverged. Goes on from the training state checkpoint-1" in second.reason
    assert second.levers == made.attempts[0].levers
    assert (third.name, third.resume_from) == ("4-fallback-fp32", Path("states/checkpoint-2"))
    assert after(made, params, "diverged", "diverged", "diverged") is None


def test_bf16_falls_back_to_fp32_and_without_bf16_so_does_fp16() -> None:
    for machine, name in (("mi300x", "4-fallback-fp32"), ("tesla_t4", "3-fallback-fp32")):
        params = params_with(on_divergence="next")
        attempt = after(plan(machine, params), params, "diverged")
        assert attempt and attempt.name == name


def test_a_fallback_after_a_shortage_keeps_the_levers_that_fitted() -> None:
    params = params_with(on_divergence="next")
    fallback = after(plan("mi300x", params), params, "rollout", "diverged")
    assert fallback and fallback.name == "3-fallback-bf16"
    assert fallback.levers.per_device_train_batch_size == 4
    assert fallback.levers.rollout_batch_size == 16
    assert fallback.levers.gradient_checkpointing
    assert "2-retry-fp16 diverged, whose levers are kept" in fallback.reason


def test_a_fallback_that_runs_short_is_answered_by_a_retrys_levers_in_the_fallbacks_precision() -> None:
    params = params_with([{"precision": "bf16"}, {"precision": "fp16"}], on_divergence="next")
    made = plan("mi300x", params)
    first, second = after(made, params, "diverged", "backward"), after(made, params, "diverged", "backward", "backward")
    assert first and second
    # bf16 diverged: neither it nor fp16, which is narrower, is tried
    assert [first.name, second.name] == ["2-retry-fp32", "3-retry-fp32"]
    assert first.levers.per_device_train_batch_size == 4 and first.levers.gradient_checkpointing
    assert "In fp32 instead, since the run diverged in bf16" in first.reason
    assert not first.precision.grad_scaler
    assert after(made, params, "diverged", "backward", "backward", "backward") is None


def test_a_run_that_diverged_and_then_did_not_fit_ended_by_the_divergence() -> None:
    first, retry = plan("mi300x").attempts
    short, diverged = ended(first, "out_of_memory"), ended(retry, "diverged")
    assert [run_status(ends) for ends in ((short,), (short, diverged), (diverged, short), (short, ended(retry, "succeeded")))] == [
        "out_of_memory",
        "diverged",
        "diverged",
        "succeeded",
    ]


def test_a_resumed_run_makes_again_what_was_cut_off_from_its_state_in_a_folder_of_its_own() -> None:
    first = plan().attempts[0]
    for status in ("cancelled", "failed"):
        again = next_attempt(plan(), (ended(first, status, STATE, earlier=True),), params_with())
        assert again
        assert (again.name, again.resume_from) == ("1-baseline-bf16-resumed-1", STATE)
        assert "not finished. Goes on from the training state checkpoint-10" in again.reason
        assert again.levers == first.levers
        assert next_attempt(plan(), (ended(first, status, STATE, earlier=True), ended(again, "failed")), params_with()) is None


def test_a_resumed_run_whose_attempt_left_no_state_starts_it_anew() -> None:
    first = plan().attempts[0]
    again = next_attempt(plan(), (ended(first, "cancelled", earlier=True), ended(first, "failed", earlier=True)), params_with())
    assert again and (again.name, again.resume_from) == ("1-baseline-bf16-resumed-2", None)
    assert "Starts anew" in again.reason


def test_a_resumed_run_goes_on_after_what_was_decided() -> None:
    first, second = plan().attempts
    short = ended(first, "out_of_memory", STATE, "backward", earlier=True)
    following = next_attempt(plan(), (short,), params_with())
    assert following and following.number == 2
    again = next_attempt(plan(), (short, ended(following, "cancelled", earlier=True)), params_with())
    assert again and (again.name, again.resume_from) == ("2-retry-fp16-resumed-1", STATE)
    # nothing is left to try: what is available may have changed since
    used_up = (short, ended(second, "out_of_memory", earlier=True))
    last = next_attempt(plan(), used_up, params_with())
    assert last and (last.name, last.resume_from) == ("2-retry-fp16-resumed-1", STATE)
    assert next_attempt(plan(), (*used_up, ended(last, "out_of_memory")), params_with()) is None


def test_what_was_skipped_in_an_earlier_start_is_decided_anew_once_and_from_its_state() -> None:
    first, second = plan().attempts
    skipped = (ended(first, "skipped", phase="rollout", earlier=True), ended(second, "skipped", phase="rollout", earlier=True))
    again = next_attempt(plan(), skipped, params_with())
    assert again and (again.name, again.levers) == ("1-baseline-bf16-resumed-1", first.levers)
    assert "Skipped in an earlier start of the run, and decided anew by what is available now" in again.reason
    retry = next_attempt(plan(), (*skipped, ended(again, "skipped")), params_with())
    assert retry and (retry.name, retry.levers.rollout_batch_size) == ("2-retry-fp16-resumed-1", None)
    assert next_attempt(plan(), (*skipped, ended(again, "skipped"), ended(retry, "skipped")), params_with()) is None
    # steps were trained before the shortage: the retry goes on from them
    stranded = (ended(first, "out_of_memory", STATE, earlier=True), ended(second, "skipped", STATE, earlier=True))
    retry = next_attempt(plan(), stranded, params_with())
    assert retry and (retry.name, retry.resume_from) == ("2-retry-fp16-resumed-1", STATE)


def test_a_resume_that_sets_other_retries_goes_on_with_what_the_plan_has_now() -> None:
    first, second = plan().attempts
    used_up = (ended(first, "out_of_memory", STATE, earlier=True), ended(second, "out_of_memory", earlier=True))
    for retries, name in (([{}, {"micro_batch_divisor": 4}], "3-retry-fp16"), ([], "1-baseline-bf16-resumed-1")):
        params = params_with(retries, allow_emulated=True)
        attempt = next_attempt(plan(params=params), used_up, params)
        assert attempt and (attempt.name, attempt.resume_from) == (name, STATE)
    cut_off = next_attempt(plan(params=params), (used_up[0], ended(second, "cancelled", earlier=True)), params)
    assert cut_off and cut_off.name == "1-baseline-bf16-resumed-1"


def test_after_a_divergence_a_resume_that_takes_the_retries_away_stays_in_the_wider_precision() -> None:
    params = params_with(on_divergence="next")
    made, less = plan("mi300x", params), params_with([], on_divergence="next")
    diverged = ended(made.attempts[0], "diverged", STATE, earlier=True)
    fallback = next_attempt(made, (diverged,), params)
    assert fallback and fallback.name == "4-fallback-fp32"
    short = ended(fallback, "out_of_memory", earlier=True)
    retry = next_attempt(made, (diverged, short), params)
    assert retry and retry.name == "2-retry-fp32"
    for before in ((diverged, short), (diverged, short, ended(retry, "out_of_memory", earlier=True))):
        again = next_attempt(plan("mi300x", less), before, less)
        assert again and (again.name, again.resume_from) == ("2-fallback-fp32-resumed-1", STATE)


def test_an_interrupted_fallback_keeps_the_levers_it_had() -> None:
    params = params_with(on_divergence="next")
    made = plan("mi300x", params)
    retry = after(made, params, "rollout")
    assert retry
    before = (ended(made.attempts[0], "out_of_memory", phase="rollout", earlier=True), ended(retry, "diverged", STATE, earlier=True))
    fallback = next_attempt(made, before, params)
    assert fallback
    again = next_attempt(made, (*before, ended(fallback, "cancelled", earlier=True)), params)
    assert again and again.name == "3-fallback-bf16-resumed-1"
    assert (again.levers, again.resume_from) == (fallback.levers, STATE)


def test_every_run_ends_with_names_of_its_own_and_never_again_in_a_precision_that_diverged() -> None:
    params = params_with([{"precision": "fp16"}, {"precision": "bf16"}, {"precision": "fp32"}], allow_emulated=True, on_divergence="next")
    for machine in sorted(set(NAMES) - UNUSABLE):
        made = plan(machine, params)
        for ends in product(("diverged", "out_of_memory"), repeat=len(made.attempts)):
            finished: tuple[FinishedAttempt, ...] = ()
            while attempt := next_attempt(made, finished, params):
                gone = {done.attempt.precision.label for done in finished if done.outcome.status == "diverged"}
                assert attempt.precision.label not in gone
                assert attempt.levers.effective_batch_size == params.training.effective_batch_size
                finished = (*finished, ended(attempt, ends[len(finished)]))
            names = [done.attempt.name for done in finished]
            assert len(set(names)) == len(names)


def test_a_run_without_any_signal_is_not_tried_in_another_precision() -> None:
    params = params_with(on_divergence="next")
    made = plan("mi300x", params)
    silent = Failure(phase="optimizer", error_type="NothingLearned", message="in no step did the completions of a group differ")
    done = ended(made.attempts[0], "diverged")
    assert next_attempt(made, (done,), params) is not None
    done = done.model_copy(update={"outcome": done.outcome.model_copy(update={"failure": silent})})
    assert next_attempt(made, (done,), params) is None


def test_fragmentation_is_answered_once_by_the_same_attempt_with_a_compact_allocator() -> None:
    params = params_with([{}, {"micro_batch_divisor": 4}])
    made = plan("mi300x", params)
    first = ended(made.attempts[0], "out_of_memory", STATE, "rollout", kind="fragmentation")
    again = next_attempt(made, (first,), params)
    assert again
    assert (again.name, again.resume_from, again.levers.compact_allocator) == ("1-baseline-bf16-resumed-1", STATE, True)
    assert again.levers == made.attempts[0].levers.model_copy(update={"compact_allocator": True})
    assert "compact allocator off -> on" in again.reason and "checkpoint-10" in again.reason
    second = ended(again, "out_of_memory", kind="fragmentation", phase="backward")
    retry = next_attempt(made, (first, second), params)
    assert retry and retry.name == "2-retry-fp16"
    # from the plan, with what was learnt; the first shortage was none of the rollout's size
    assert retry.levers == made.attempts[1].levers.model_copy(update={"compact_allocator": True})
    third = ended(retry, "out_of_memory", kind="fragmentation", phase="backward")
    last = next_attempt(made, (first, second, third), params)
    assert last and (last.number, last.levers.per_device_train_batch_size) == (3, 2)


def test_where_the_allocator_is_compact_already_fragmentation_leads_to_the_next_retry() -> None:
    params = Params.model_validate({"training": {"compact_allocator": True}})
    made = plan("mi300x", params)
    retry = next_attempt(made, (ended(made.attempts[0], "out_of_memory", kind="fragmentation"),), params)
    assert retry and retry.number == 2 and retry.levers.compact_allocator


def test_levers_answer_a_shortage_of_host_memory_only_where_it_is_the_devices() -> None:
    for machine, number in (("mi300x", None), ("a100_80gb_pcie", None), ("apple_m4_max", 2), ("cpu_epyc_9r14", 2)):
        made = plan(machine)
        retry = next_attempt(made, (ended(made.attempts[0], "out_of_memory", STATE, kind="host"),), params_with())
        assert (retry and retry.number) == number, machine


def test_a_preemption_goes_on_as_it_was_three_times_without_a_new_state() -> None:
    made = plan("mi300x")
    finished: tuple[FinishedAttempt, ...] = (ended(made.attempts[0], "cancelled", STATE),)
    for times in (1, 2, 3):
        again = next_attempt(made, finished, params_with())
        assert again and (again.name, again.resume_from) == (f"1-baseline-bf16-resumed-{times}", STATE)
        assert again.levers == made.attempts[0].levers and again.precision == made.attempts[0].precision
        assert f"SIGTERM, which the run did not ask for ({times} of at most 3 in a row)" in again.reason
        finished = (*finished, ended(again, "cancelled"))
    assert preemptions(finished) == 4
    assert next_attempt(made, finished, params_with()) is None
    assert run_status(finished) == "failed"
    newer = (*finished[:-1], ended(finished[-1].attempt, "cancelled", STATE.with_name("checkpoint-20")))
    once_more = next_attempt(made, newer, params_with())
    assert once_more and "(1 of at most 3 in a row)" in once_more.reason
    assert once_more.resume_from == STATE.with_name("checkpoint-20")


def test_a_retry_that_is_preempted_goes_on_as_that_retry() -> None:
    made = plan("mi300x")
    short = ended(made.attempts[0], "out_of_memory", STATE, "rollout")
    retry = next_attempt(made, (short,), params_with())
    assert retry
    again = next_attempt(made, (short, ended(retry, "cancelled")), params_with())
    assert again and (again.name, again.levers, again.resume_from) == ("2-retry-fp16-resumed-1", retry.levers, STATE)


def test_a_widened_retry_keeps_its_precision_when_it_goes_on() -> None:
    params = params_with([{"precision": "bf16"}], on_divergence="next")
    made = plan("mi300x", params)
    finished = [ended(made.attempts[0], "diverged", STATE)]
    fallback = next_attempt(made, tuple(finished), params)
    assert fallback
    finished.append(ended(fallback, "out_of_memory"))
    retry = next_attempt(made, tuple(finished), params)
    assert retry and retry.name == "2-retry-fp32"
    again = next_attempt(made, (*finished, ended(retry, "cancelled")), params)
    assert again and again.name == "2-retry-fp32-resumed-1"


def test_what_trains_other_weights_starts_anew_and_says_why() -> None:
    params = params_with([{"lora_rank": 4}, {"lora_rank": 4, "micro_batch_divisor": 4}, {}])
    made = plan("mi300x", params)
    lora = after(made, params, "backward")
    assert lora and lora.resume_from is None
    assert "the training state in hand is of all weights, and this attempt trains LoRA rank 4" in lora.reason
    same = after(made, params, "backward", "backward")
    assert same and same.resume_from == Path("states/checkpoint-2")
    full = after(made, params, "backward", "backward", "backward")
    assert full and full.resume_from == Path("states/checkpoint-1")


def test_8_bit_states_go_on_from_a_state_of_32_bit_ones_and_begin_anew() -> None:
    params = params_with([{"optimizer_8bit": True}, {"optimizer_8bit": True}])
    made = plan("mi300x", params)
    retry, second = after(made, params, "backward"), after(made, params, "backward", "backward")
    assert retry and second
    assert retry.resume_from == Path("states/checkpoint-1") and retry.reason.endswith("checkpoint-1, the optimizer's states begin anew")
    assert second.reason.endswith("Goes on from the training state checkpoint-2")
    # one that left no state of its own: the state in hand is still the baseline's
    short = ended(made.attempts[0], "out_of_memory", STATE, "backward")
    again = next_attempt(made, (short, ended(retry.model_copy(update={"resume_from": STATE}), "out_of_memory")), params)
    assert again and again.reason.endswith("checkpoint-10, the optimizer's states begin anew")
