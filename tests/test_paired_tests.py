"""The paired tests against scipy's and against figures worked out by hand."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_rel

from tasks.paired_tests import ALPHA, BASE, NUM_CRITERIA, accuracy_tests, block_tests, contrasts

TIMES = {"bf16": [100.0, 112.0, 95.0, 104.0], "fp16": [118.0, 137.0, 109.0, 120.0], "fp32": [140.0, 150.0, 139.0, 150.0]}


def test_with_two_variants_it_is_the_paired_t_test() -> None:
    (test,) = block_tests("step_time", {name: TIMES[name] for name in ("fp16", "bf16")})
    expected = ttest_rel(np.log(TIMES["fp16"]), np.log(TIMES["bf16"]))
    assert (test.better, test.worse, test.freedom) == ("bf16", "fp16", 3)
    assert test.p_value == pytest.approx(expected.pvalue)
    (contrast,) = contrasts([test])
    interval = expected.confidence_interval(1 - ALPHA / NUM_CRITERIA)
    assert (contrast.low, contrast.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))
    assert contrast.effect == pytest.approx(math.exp(np.mean(np.log(TIMES["fp16"]) - np.log(TIMES["bf16"]))))


def test_with_more_variants_the_residual_is_that_of_a_two_way_analysis_of_variance() -> None:
    tests = block_tests("step_time", TIMES)
    values = np.log(np.array(list(TIMES.values())))
    design = np.array([[*np.eye(3)[row], *np.eye(4)[column, 1:]] for row in range(3) for column in range(4)])
    _, rest, *_ = np.linalg.lstsq(design, values.ravel())
    assert {test.freedom for test in tests} == {6}
    assert tests[0].error == pytest.approx(math.sqrt(rest[0] / 6 * 2 / 4))
    # the pairs' squared t add up to the F of the analysis
    f_value = 4 * values.mean(axis=1).var(ddof=1) / (rest[0] / 6)
    assert sum((test.difference / test.error) ** 2 for test in tests) == pytest.approx(3 * f_value)


def test_holm_within_a_criterion_and_bonferroni_over_the_criteria_and_the_pairs_own_test_beside_it() -> None:
    tests = sorted(block_tests("step_time", TIMES), key=lambda test: test.p_value)
    raw = [test.p_value for test in tests]
    holm = [12 * raw[0], 8 * raw[1], max(8 * raw[1], 4 * raw[2])]
    own = [4 * ttest_rel(np.log(TIMES[test.worse]), np.log(TIMES[test.better])).pvalue for test in tests]
    assert any(ours > theirs for ours, theirs in zip(own, holm, strict=True))
    expected = {(test.better, test.worse): max(pair) for test, *pair in zip(tests, own, holm, strict=True)}
    assert {(it.better, it.worse): it.p_value for it in contrasts(tests)} == pytest.approx(expected)


def test_memory_that_repeats_to_the_byte_gives_neither_a_crash_nor_certainty() -> None:
    same, near, far = ([value] * 3 for value in (1000.0, 1015.0, 1100.0))
    found = contrasts(block_tests("peak_memory", {"same": same, "near": near, "far": far, "twin": same}))
    assert all(contrast.p_value > 1e-6 and contrast.low < contrast.effect < contrast.high for contrast in found)
    assert {(contrast.better, contrast.worse) for contrast in found if contrast.shown} == {
        ("same", "far"),
        ("near", "far"),
        ("twin", "far"),
    }


def test_a_difference_too_small_to_matter_is_not_named_however_sure() -> None:
    seeds = [1000 + 10 * at for at in range(60)]
    (contrast,) = contrasts(block_tests("peak_memory", {"one": seeds, "other": [1.01 * value for value in seeds]}))
    assert contrast.p_value < 1e-6
    assert not contrast.shown


def test_a_problem_counts_once_however_many_seeds_solve_it() -> None:
    easy, gained, lost = [True] * 20, [True] * 12, [False] * 2
    mine = [easy + gained + lost] * 3
    theirs = [easy + [not it for it in gained + lost]] * 3
    (test,) = accuracy_tests({"mine": mine, "theirs": theirs}, {})
    assert (test.better, test.difference) == ("mine", pytest.approx(10 / 34))
    assert test.p_value == pytest.approx(binomtest(12, 14).pvalue)
    against_base = accuracy_tests({"mine": mine}, {"mine": theirs})
    assert [(it.better, it.worse) for it in against_base] == [("mine", BASE)]
    assert against_base[0].p_value == pytest.approx(binomtest(12, 14).pvalue)


def test_runs_that_disagree_over_seeds_outweigh_many_problems() -> None:
    good, poor = [True] * 900 + [False] * 100, [True] * 500 + [False] * 500
    (test,) = accuracy_tests({"one": [good, good, poor], "other": [poor, good, good]}, {})
    assert test.p_value > 0.5
    (test,) = accuracy_tests({"one": [good, good, good], "other": [good, poor, poor]}, {})
    assert test.p_value > 0.1


@pytest.mark.parametrize(("spreads", "share"), [((0.2, 0.2, 0.2), 0.05), ((0.5, 0.05, 0.05), 0.06)])
def test_false_alarms_where_no_size_is_too_small_to_matter(spreads: tuple[float, ...], share: float) -> None:
    """Three variants alike but for how much they vary; tests that pool alone raise twice as many alarms of the uneven ones."""
    rng, alarms, number = np.random.default_rng(0), 0, 1000
    for _ in range(number):
        found = []
        for measure in ("step_time", "peak_memory", "curve_spread"):
            values = np.exp(0.3 * rng.standard_normal((1, 3)) + np.array(spreads)[:, None] * rng.standard_normal((3, 3)))
            found += contrasts(block_tests(measure, dict(zip("abc", values.tolist(), strict=True))))
        alarms += any(contrast.shown for contrast in found)
    assert 0 < alarms <= share * number


@pytest.mark.parametrize("logit", [-3.0, 3.0])
def test_a_base_model_that_answers_once_for_many_seeds_is_not_called_worse_or_better_than_its_equal(logit: float) -> None:
    """Hard or easy problems: of ten draws one or more is right, or wrong, more often than of the base model's one."""
    rng, alarms, number = np.random.default_rng(0), 0, 200
    for _ in range(number):
        share = 1 / (1 + np.exp(-logit - 1.5 * rng.standard_normal(300)))
        base, *draws = (rng.random((11, 300)) < share).tolist()
        alarms += any(contrast.shown for contrast in contrasts(accuracy_tests({"a": draws}, {"a": [base] * 10})))
    assert alarms <= 0.05 * number
