"""Measures of one run, from steps as a program writes them."""

import math

import pytest

from tasks.evaluation import accuracy
from tasks.measures import correct_answers, detrended_spread, run_measures
from tasks.memory import MB
from tasks.program_request import ModelAnswers, ScoredAnswer
from tasks.records import Failure, Outcome

DONE = Outcome(status="succeeded", peak_memory_bytes=700 * MB, steps_done=12, total_steps=12)


def step(number: int, **changed: float) -> dict[str, float]:
    usual = {
        "step": float(number),
        "time": 1e9 + number,
        "step_time_ms": 100.0 + number,
        "forward_backward_time_ms": 40.0,
        "rollout_time_ms": 50.0,
        "tokens_per_second": 900.0,
        "peak_memory_mb": 600.0 + number,
        "loss": 0.0,
        "reward": 0.1 * number,
        "entropy": 2.0,
        "grad_norm": 1.0 + number % 2,
    }
    return {**usual, **changed}


def test_the_warm_up_is_left_out_of_times_and_curves() -> None:
    steps = [step(1, step_time_ms=9000.0, reward=50.0), step(2, step_time_ms=8000.0), *(step(number) for number in range(3, 13))]
    found = run_measures(steps, 2, DONE)
    assert (found.warmup_steps, found.measured_steps) == (2, 10)
    assert (found.step_time_ms, found.step_time_ms_p95) == (107.5, 112.0)
    assert (found.forward_backward_time_ms, found.rollout_time_ms, found.tokens_per_second) == (40, 50, 900)
    assert found.reward == pytest.approx(1.15)  # of the last two of ten
    assert (found.reward_spread, found.entropy_spread) == (pytest.approx(0, abs=1e-12), 0)
    # the logarithms of 1, 2, 1, 2 about the mean of three; ten times as large they spread alike
    assert found.grad_norm_spread == pytest.approx(2 / 3 * math.log(2))
    larger = [{**its, "grad_norm": 10 * its["grad_norm"]} for its in steps]
    assert run_measures(larger, 2, DONE).grad_norm_spread == pytest.approx(found.grad_norm_spread)


def test_what_a_run_did_not_have_is_null() -> None:
    steps = [{name: value for name, value in step(number).items() if name != "entropy"} for number in range(1, 5)]
    found = run_measures(steps, 0, DONE)
    absent = ("entropy_spread", "lowest_loss_scale", "mismatch_kl", "mismatch_rms", "mismatch_max", "accuracy")
    assert [getattr(found, name) for name in absent] == [None] * len(absent)
    assert (found.skipped_steps, found.nan_events, found.lost_share) == (0, 0, 0)


def test_a_scalers_skips_count_from_the_first_step_and_are_no_nan_events() -> None:
    steps = [
        step(1, step_skipped=1.0, loss_scale=512.0, grad_norm=math.inf, loss=math.nan),
        step(2, step_skipped=0.0, loss_scale=256.0, grad_norm=math.nan),
        *(step(number, step_skipped=0.0, loss_scale=1024.0) for number in range(3, 11)),
    ]
    found = run_measures(steps, 1, DONE)
    assert (found.skipped_steps, found.lowest_loss_scale, found.nan_events) == (1, 256.0, 1)
    assert found.lost_share == pytest.approx(0.2)
    assert found.grad_norm_spread is not None and math.isfinite(found.grad_norm_spread)


def test_the_peak_is_the_process_own_and_is_given_by_device_where_known() -> None:
    steps = [step(number) for number in range(1, 5)]
    assert run_measures(steps, 0, DONE).peak_memory_mb_by_device == ()
    unsaid = DONE.model_copy(update={"peak_memory_bytes": None})
    assert run_measures(steps, 0, unsaid).peak_memory_mb == 604
    found = run_measures(steps, 0, DONE.model_copy(update={"peak_memory_by_device": (504 * MB, 700 * MB)}))
    assert (found.peak_memory_mb, found.peak_memory_mb_by_device) == (700, (504, 700))


def test_mismatch_is_a_median_and_a_maximum() -> None:
    steps = [step(number, mismatch_kl=0.1 * number, mismatch_rms=number, mismatch_max=10.0 - number) for number in range(1, 4)]
    found = run_measures(steps, 0, DONE)
    assert (found.mismatch_kl, found.mismatch_rms, found.mismatch_max) == (0.2, 2, 9)


def test_accuracy_comes_with_its_interval() -> None:
    answers = tuple(ScoredAnswer(question="q", expected="e", completion="c", score=score) for score in (1.0, 1.0, 0.0, 0.5))
    found = run_measures([step(1)], 0, DONE, accuracy(answers, 0.5))
    assert found.accuracy is not None and (found.accuracy.share, found.accuracy.num_problems) == (0.75, 4)
    assert found.accuracy.low < 0.75 < found.accuracy.high
    assert correct_answers(ModelAnswers(answers=answers), 0.5) == (True, True, False, True)


def test_neither_a_rise_nor_a_bend_is_spread() -> None:
    times = [at / 100 for at in range(100)]
    assert detrended_spread([3 * at for at in times]) == pytest.approx(0, abs=1e-12)
    bend = [1 - math.exp(-3 * at) for at in times]
    swings = [0.1 * (-1) ** at for at in range(100)]
    both = [one + other for one, other in zip(bend, swings, strict=True)]
    assert detrended_spread(both) == pytest.approx(detrended_spread(swings), rel=0.02)
    assert (detrended_spread([1.0, 2.0]), detrended_spread([1.0] * 50)) == (None, 0)


def test_how_a_run_ended_is_said_in_a_few_words() -> None:
    failure = Failure(phase="forward", error_type="OutOfMemoryError", message="")
    short = Outcome(status="out_of_memory", shortage="device", steps_done=3, total_steps=100, failure=failure)
    assert short.ending == "ran out of device memory in forward, 3 of 100 steps"
    assert Outcome(status="diverged", steps_done=7, total_steps=100).ending == "diverged, 7 of 100 steps"
