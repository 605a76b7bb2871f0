"""The verdict: what it says of given runs, how often it is wrong of equal variants, and how often it finds a planted difference."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tasks.comparison_records import Criterion, Finding, MeasuredRun, RunMeasures, Verdict
from tasks.records import Status
from tasks.verdict import judge
from tests.comparisons import Plant, comparison

NUM_COMPARISONS = 200


def run(variant: str, seed: int, status: Status = "succeeded", **changed: float) -> MeasuredRun:
    values = {
        "warmup_steps": 2,
        "measured_steps": 100,
        "step_time_ms": 1000.0 + 20 * seed,
        "step_time_ms_p95": 1200.0,
        "forward_backward_time_ms": 400.0,
        "rollout_time_ms": 500.0,
        "tokens_per_second": 900.0,
        "peak_memory_mb": 3000.0,
        "reward": 0.5,
        "reward_spread": 0.05,
        "entropy_spread": 0.1,
        "grad_norm_spread": 0.2,
        "skipped_steps": 0,
        "lowest_loss_scale": None,
        "nan_events": 0,
    }
    measures = RunMeasures.model_validate({**values, **changed})
    what = "" if status == "succeeded" else f"{status}, 3 of 100 steps"
    order = 10 * seed + len(variant)
    if status != "succeeded":
        return MeasuredRun(variant=variant, seed=seed, order=order, status=status, what_happened=what)
    half = (True, False) * 50
    return MeasuredRun(variant=variant, seed=seed, order=order, status=status, measures=measures, correct=half, base_correct=half)


def three_seeds(variant: str, **changed: float) -> list[MeasuredRun]:
    return [run(variant, seed, **changed) for seed in range(3)]


def finding(verdict: Verdict, criterion: Criterion) -> Finding:
    return next(found for found in verdict.findings if found.criterion == criterion)


def test_equal_variants_show_no_difference() -> None:
    verdict = judge([*three_seeds("fp16"), *three_seeds("bf16")])
    assert verdict.best_overall is None and not verdict.indicative
    assert [found.best for found in verdict.findings] == [None] * 4
    assert "between fp16 and bf16 no difference that these runs can show" in verdict.sentences[0]
    assert "no difference that these runs can show" in finding(verdict, "memory").sentence
    assert finding(verdict, "accuracy").sentence.startswith(
        "Best for accuracy: no difference that these runs can show; fp16 50.0 and bf16 50.0 % of the held-out problems"
    )


def unevaluated(runs: list[MeasuredRun], **changed: Any) -> list[MeasuredRun]:
    return [item.model_copy(update={"correct": (), "base_correct": (), **changed}) for item in runs]


def test_without_an_evaluation_no_variant_is_best_overall() -> None:
    fast = three_seeds("bf16", step_time_ms=100)
    assert judge([*fast, *three_seeds("fp32")]).best_overall == "bf16"
    for others in (unevaluated(three_seeds("fp32")), unevaluated(three_seeds("fp32"), correct=(True, False))):
        verdict = judge([*fast, *others])
        assert (verdict.best_overall, finding(verdict, "speed").best) == (None, "bf16")
        assert "not evaluated on the same problems in every run, and time and memory do not buy" in verdict.sentences[0]
    none_at_all = judge([*unevaluated(fast), *unevaluated(three_seeds("fp32"))])
    assert none_at_all.best_overall is None and "bf16 and fp32 were not evaluated" in none_at_all.sentences[0]
    collapsed = judge([*unevaluated(fast), *unevaluated(three_seeds("fp32", reward=0.0))])
    assert (finding(collapsed, "accuracy").contrasts, collapsed.best_overall) == ((), None), "a training reward alone is no accuracy"


def test_a_model_that_is_worse_than_the_base_model_is_not_best() -> None:
    plants = {"usual": Plant(logit=-4.0, step_time=3.0), "fast": Plant(logit=-4.0)}
    verdict = judge(comparison(np.random.default_rng(0), plants))
    assert (verdict.best_overall, verdict.left, finding(verdict, "speed").best) == (None, (), "fast")
    assert (
        verdict.sentences[0]
        == "No variant is best overall: none is left; usual shown worse in speed; usual and fast shown worse than the base model."
    )


def test_two_measures_that_speak_against_each_other_make_neither_variant_more_stable() -> None:
    calm = three_seeds("calm", reward_spread=0.01, entropy_spread=0.02, grad_norm_spread=0.04, skipped_steps=60)
    verdict = judge([*calm, *three_seeds("whole")])
    found = finding(verdict, "stability")
    assert (found.best, verdict.best_overall, verdict.left) == (None, None, ("calm", "whole"))
    assert "between calm and whole one measure speaks against the other" in found.sentence
    assert found.beats("calm", "whole") is found.beats("whole", "calm") is False


def test_best_overall_is_ahead_of_every_other_and_not_what_two_that_contradict_each_other_leave() -> None:
    narrow = {"reward_spread": 0.01, "entropy_spread": 0.02, "grad_norm_spread": 0.04}
    whole = [run("whole", seed, skipped_steps=0) for seed in range(3)]
    calm = [run("calm", seed, skipped_steps=60, **narrow) for seed in range(3)]
    uneven = [run("middle", seed, skipped_steps=(0, 3, 9)[seed], reward_spread=0.04) for seed in range(3)]
    verdict = judge([*calm, *whole, *uneven])
    found = finding(verdict, "stability")
    assert "between whole and calm one measure speaks against the other" in found.sentence or "between calm and whole one" in found.sentence
    assert not any(found.beats(*pair) for pair in (("whole", "middle"), ("middle", "whole"), ("calm", "whole"), ("whole", "calm")))
    assert (found.best, verdict.best_overall) == (None, None)
    # the faster of two is behind if an earlier criterion speaks for the other
    verdict = judge([*whole, *(run("third", seed, skipped_steps=40, step_time_ms=100) for seed in range(3))])
    assert (verdict.best_overall, verdict.left, finding(verdict, "speed").best) == ("whole", ("whole",), "third")


def test_what_the_hardware_refuses_is_missing_and_not_called_unstable() -> None:
    refused = [run("bf16", seed, "failed").model_copy(update={"refused": True}) for seed in range(3)]
    verdict = judge([*refused, *three_seeds("fp32")])
    assert (verdict.best_overall, verdict.only_finished) == (None, None)
    assert verdict.sentences == (
        "No variant is best overall: fp32 alone was measured; bf16 is refused by this machine.",
        "No variant was tested against another (3 seeds, 100 or more measured steps a run).",
    )
    assert "bf16" not in finding(verdict, "stability").sentence


def test_an_accuracy_of_nothing_is_said() -> None:
    hopeless = {"fp32": Plant(), "bf16": Plant(logit=-100.0)}
    found = finding(judge(comparison(np.random.default_rng(0), hopeless)), "accuracy")
    assert "bf16 0.0 % of the held-out problems" in found.sentence


def test_less_memory_is_best_and_explained() -> None:
    verdict = judge([*three_seeds("fp32", peak_memory_mb=4200), *three_seeds("bf16", peak_memory_mb=3000)])
    found = finding(verdict, "memory")
    assert found.decides is not None
    assert (verdict.best_overall, found.best, found.decides.effect) == ("bf16", "bf16", pytest.approx(1.4))
    assert 0 < found.decides.p_value < 0.05 and 1 < found.decides.low < 1.4 < found.decides.high
    assert "fp32 4,200 and bf16 3,000 MB at the peak; fp32 takes 1.40 times the peak memory of bf16 (1." in found.sentence
    assert verdict.sentences[0] == "bf16 is best overall: fp32 shown worse in memory."
    assert verdict.sentences[1].startswith(
        "Best for accuracy: none shown; for stability: none shown; for speed: none shown; for memory: bf16 ("
    )


def test_a_worse_third_variant_leaves_two_between_which_nothing_is_shown() -> None:
    verdict = judge([*three_seeds("bf16"), *three_seeds("fp16"), *three_seeds("fp32", step_time_ms=3000)])
    found = finding(verdict, "speed")
    assert (found.best, verdict.best_overall) == (None, None)
    assert found.beats("bf16", "fp32") and not found.beats("bf16", "fp16")
    assert "no single variant" in found.sentence and "between bf16 and fp16 no difference" in found.sentence
    assert verdict.sentences[0].endswith("between bf16 and fp16 no difference that these runs can show; fp32 shown worse in speed.")
    assert "for speed: bf16 or fp16; " in verdict.sentences[1]


def test_speed_does_not_buy_lost_steps() -> None:
    fast = [run("fp16", seed, step_time_ms=500.0, skipped_steps=40 + seed, lowest_loss_scale=0.5) for seed in range(3)]
    verdict = judge([*fast, *three_seeds("bf16")])
    assert [(found.criterion, found.best) for found in verdict.findings if found.best] == [("stability", "bf16"), ("speed", "fp16")]
    assert verdict.best_overall == "bf16"
    told = finding(verdict, "stability").sentence
    never_fell = [run("fp16", seed, lowest_loss_scale=65536.0) for seed in range(3)]
    assert "loss scale" not in finding(judge([*never_fell, *three_seeds("bf16")]), "stability").sentence
    assert "fp16 skipped 40 to 42 steps a run and lowered its loss scale to 0.5" in told
    assert "fp16 loses 40.2 points more of its steps than bf16" in told


@pytest.mark.parametrize(
    ("status", "criterion", "told"),
    [
        ("out_of_memory", "memory", "fp16 ran out of memory in 1 of 3 runs"),
        ("skipped", "memory", "fp16 was not tried for want of memory in 1 of 3 runs"),
        ("diverged", "stability", "fp16 diverged in 1 of 3 runs"),
    ],
)
def test_a_variant_that_fails_once_is_never_best_and_the_others_are_compared(status: Status, criterion: Criterion, told: str) -> None:
    poor = [run("fp16", 0, status), *(run("fp16", seed, step_time_ms=100, peak_memory_mb=100, grad_norm_spread=0.001) for seed in (1, 2))]
    verdict = judge([*poor, *three_seeds("bf16"), *three_seeds("fp32", peak_memory_mb=6000)])
    assert [found.best for found in verdict.findings] == [None, None, None, "bf16"]
    assert verdict.sentences[0] == f"bf16 is best overall: fp32 shown worse in memory; {told}."
    assert [found.criterion for found in verdict.findings if f"fp16 with seed 0 {status}, 3 of 100 steps" in found.sentence] == [criterion]


@pytest.mark.parametrize("status", ["out_of_memory", "diverged", "skipped"])
def test_the_only_variant_that_finished_is_not_called_shown_to_be_best(status: Status) -> None:
    verdict = judge([*three_seeds("bf16"), run("fp16", 0, status), run("fp16", 1), run("fp16", 2)])
    assert [found.best for found in verdict.findings] == [None] * 4
    assert (verdict.best_overall, verdict.only_finished) == (None, "bf16")
    told = "No variant is shown best, but bf16 is the only one that neither ran out of memory nor diverged: fp16 "
    assert verdict.sentences[0].startswith(told) and verdict.sentences[0].endswith("in 1 of 3 runs (counted, not tested).")
    disk_full = [run("fp32", seed, "failed") for seed in range(3)]
    by_chance = judge([*three_seeds("bf16"), *(run("fp16", seed, status) for seed in range(3)), *disk_full])
    assert by_chance.only_finished is None


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_run_that_says_nothing_of_its_variant_takes_its_seed_out_for_all(status: Status) -> None:
    """A full disk or a kill from outside does not make a variant unstable."""
    slow_seed = [*three_seeds("bf16")[:2], run("bf16", 2, step_time_ms=90000), *three_seeds("fp16")[:2], run("fp16", 2, status)]
    verdict = judge(slow_seed)
    decides = finding(verdict, "speed").decides
    assert (verdict.best_overall, verdict.only_finished, decides and decides.effect) == (None, None, pytest.approx(1))
    assert "2 seeds" in verdict.sentences[1] and "seed 2 left out, since fp16" in verdict.sentences[0]
    never = judge([*three_seeds("bf16"), *three_seeds("fp32", step_time_ms=3000), *(run("fp16", seed, status) for seed in range(3))])
    how = "failed" if status == "failed" else "was cut off"
    assert never.sentences[0] == f"bf16 is best overall: fp32 shown worse in speed; fp16 {how} in 3 of 3 runs."


def test_narrow_curves_of_a_policy_that_gave_up_are_not_called_stable() -> None:
    spreads = {"reward_spread": 0.005, "entropy_spread": 0.01, "grad_norm_spread": 0.02}
    given_up = judge([*three_seeds("bf16"), *three_seeds("fp16", reward=0.1, **spreads)])
    found = finding(given_up, "stability")
    assert found.best is None and "as those of fp16" in found.sentence and "not counted since the reward of fp16 is lower" in found.sentence
    assert finding(judge([*three_seeds("bf16"), *three_seeds("fp16", **spreads)]), "stability").best == "fp16"
    # it writes short answers, too
    fast = judge([*three_seeds("bf16"), *three_seeds("fp16", reward=0.1, step_time_ms=100, peak_memory_mb=300)])
    assert (fast.best_overall, [item.best for item in fast.findings]) == ("bf16", ["bf16", None, None, None])


def test_a_reward_that_collapsed_is_a_worse_model_where_few_problems_cannot_show_it() -> None:
    """Three runs of 46.7, 53.3 and 31.7 % against none solved: too few seeds for so wide a spread (seen in a comparison)."""

    def solved(variant: str, *counts: int, **changed: float) -> list[MeasuredRun]:
        answers = [tuple(at < count for at in range(60)) for count in counts]
        pairs = zip(three_seeds(variant, **changed), answers, strict=True)
        return [item.model_copy(update={"correct": own, "base_correct": (False,) * 60}) for item, own in pairs]

    verdict = judge([*solved("usual", 28, 32, 19, reward=0.88), *solved("ruinous", 0, 0, 0, reward=0.0)])
    found = finding(verdict, "accuracy")
    assert [(one.measure, one.better) for one in found.contrasts if one.shown] == [("reward", "usual")]
    assert (verdict.best_overall, found.best) == ("usual", "usual")
    assert "usual ends at a reward 0.880 above that of ruinous" in found.sentence
    hacked = judge([*solved("usual", 50, 52, 51, reward=0.5), *solved("hacking", 0, 1, 0, reward=0.9)])
    assert "between usual and hacking one measure speaks against the other" in finding(hacked, "accuracy").sentence
    assert hacked.best_overall is None


def test_many_variants_are_not_all_said_in_one_sentence() -> None:
    many = [item for number in range(9) for item in three_seeds(f"{number}" * (number + 1), step_time_ms=1000 * 1.5**number)]
    found = finding(judge(many), "speed")
    assert found.best == "0" and len(found.contrasts) == 36
    assert found.sentence.count("times the step time") == 6 and "30 more in the table" in found.sentence


def test_no_variant_left_is_said() -> None:
    verdict = judge([run("bf16", 0, "diverged"), run("fp16", 0, "failed")])
    assert verdict.sentences[0] == "No verdict: none of bf16 and fp16 finished every run."
    assert (verdict.findings, verdict.best_overall) == ((), None)
    alone = judge(three_seeds("bf16"))
    assert (alone.best_overall, alone.sentences[0]) == (None, "No variant is best overall: bf16 alone was measured.")


@pytest.mark.parametrize(
    "runs",
    [
        [*three_seeds("bf16"), *three_seeds("fp16", step_time_ms=9000)[:2], run("fp16", 2, measured_steps=99)],
        [run("bf16", 0), run("fp16", 0, step_time_ms=9000)],
    ],
)
def test_too_few_steps_or_seeds_give_no_verdict(runs: Sequence[MeasuredRun]) -> None:
    verdict = judge(runs)
    assert (verdict.indicative, verdict.findings, verdict.best_overall) == (True, (), None)
    assert verdict.sentences[0].startswith("Indicative only, and no verdict")


def test_curves_that_never_vary_are_left_out() -> None:
    flat = [*three_seeds("bf16", reward_spread=0.0), *three_seeds("fp16", reward_spread=0.0, grad_norm_spread=0.8, entropy_spread=0.4)]
    assert finding(judge(flat), "stability").best == "bf16"
    assert "compared by the curves of entropy and gradient norm" in finding(judge(flat), "stability").sentence
    nothing = [run(name, seed, reward_spread=0, entropy_spread=0, grad_norm_spread=0) for name in ("bf16", "fp16") for seed in range(3)]
    assert finding(judge(nothing), "stability").contrasts == ()
    assert "no curve varies in every run" in finding(judge(nothing), "stability").sentence


def test_the_order_of_the_runs_changes_nothing() -> None:
    runs = list(comparison(np.random.default_rng(1), {"a": Plant(), "b": Plant(memory=1.2), "c": Plant()}))
    expected = judge(runs)
    random.Random(0).shuffle(runs)
    assert judge(runs) == expected


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_equal_variants_raise_a_false_alarm_in_a_twentieth_of_comparisons_or_fewer(names: str) -> None:
    alarms = 0
    for number in range(NUM_COMPARISONS):
        verdict = judge(comparison(np.random.default_rng(number), {name: Plant() for name in names}))
        alarms += bool(verdict.best_overall) or any(contrast.shown for found in verdict.findings for contrast in found.contrasts)
    assert alarms <= 0.05 * NUM_COMPARISONS


def test_planted_differences_are_found() -> None:
    """One variant of three, over three seeds, is better by the sizes that tasks.paired_tests states; one skips steps at first."""
    plants = {"usual": Plant(), "better": Plant(1 / 1.25, 1 / 1.09, 1 / 3.3, 3.5), "skipping": Plant(early_skips=20)}
    found = dict.fromkeys([*Criterion.__args__, "overall", "lost_steps"], 0)
    alarms = 0
    for number in range(NUM_COMPARISONS):
        verdict = judge(comparison(np.random.default_rng(10_000 + number), plants))
        shown = {(one.measure, one.better, one.worse) for each in verdict.findings for one in each.contrasts if one.shown}
        for each in verdict.findings:
            found[each.criterion] += each.best == "better"
        found["overall"] += verdict.best_overall == "better"
        found["lost_steps"] += ("lost_steps", "usual", "skipping") in shown
        wrong = {(measure, one, other) for measure, one, other in shown if other == "better" or {one, other} <= {"usual", "the base model"}}
        alarms += bool(wrong)
    assert {name: count for name, count in found.items() if count < 0.95 * NUM_COMPARISONS} == {}
    assert alarms <= 0.05 * NUM_COMPARISONS
