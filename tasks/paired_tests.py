"""Test variants against each other with the seed as a block, corrected for everything that one verdict compares. Pure.

The model of each measure is variant + seed + residual, on a log scale for times, memory and spreads. Each pair takes two t-tests, and
the larger p of both counts. One pools the residual over all variants, (variants - 1) x (seeds - 1) degrees of freedom, and is corrected
by Holm within a criterion and by Bonferroni over the four criteria. The other rests on the pair's own differences, seeds - 1 degrees of
freedom, and is corrected over the criteria and, of more than three variants, over half of them: it stops a pair that varies more than
the others, which pooling takes for sure. So a verdict over variants that do not differ names a difference in 5 % of all cases or fewer,
and in about 6 % where one variant varies ten times as much as the others (10 % and more by pooling alone; tests/test_paired_tests.py
counts both).

Accuracy takes tests of two kinds, and the largest p counts. Runs of one variant differ by more than the chance of their problems, which
only the spread over seeds shows; and seeds share their problems, which only a test by problem sees: McNemar's exact test, where a
problem is gained by the variant that solves it with more seeds, and, against the base model, a normal test of the mean over problems.
The last is there since the base model answers once for all seeds where a variant answers anew with each. Sampled answers to a hard
problem are then right in one of five runs of a variant more often than in the base model's one, though both solve it equally often, so that
gained and lost problems are no fair coin; and the luck of the base model's one draw is in every seed's difference and so not in their
spread. The mean is 0 for equal models, and its spread over problems holds both models' draws. By the other two alone a variant as good as
a base model that solves a fifth of the problems or fewer was called different from it in 6 to 12 % of comparisons of five seeds and in a
third or more of ten; with the mean, in 1 % or less, of three, five and ten.

A best variant of three, with three seeds, is found in 95 % of all cases if it is ahead by 14 times the spread that a variant's runs
have about their seeds' mean (two variants: 13 times; five seeds: 5 and 4.5 times). In numbers, as tests/test_verdict.py plants them:
25 % in step time where that spread is a little over 1 %, 9 % in peak memory, curves that spread 3.3 times as wide, a fifth of the steps
lost, 43 points of accuracy on 200 problems. Five seeds show 15 %, 5 %, 2.2 times and 20 points.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, stdev

from scipy.stats import norm as normal
from scipy.stats import t as student

from tasks.comparison_records import ComparedMeasure, Contrast
from tasks.evaluation import mcnemar

ALPHA = 0.05
NUM_CRITERIA = 4
BASE = "the base model"
Table = Mapping[str, Sequence[float]]  # per variant a value of each seed, seeds in the same order
Answers = Mapping[str, Sequence[Sequence[bool]]]  # per variant and seed whether each problem was solved


@dataclass(frozen=True)
class Scale:
    """How a measure is compared: as a ratio or a difference; `floor` is the least residual spread that is believed.

    A difference below `matters` is not named, however sure. Ratios count from 1, shares are absolute.
    """

    is_ratio: bool
    floor: float
    matters: float


SCALES: dict[ComparedMeasure, Scale] = {
    "step_time": Scale(is_ratio=True, floor=0.005, matters=0.02),
    # peaks repeat to the byte or jump by a block of the allocator: their own spread would show any difference with p = 0
    "peak_memory": Scale(is_ratio=True, floor=0.005, matters=0.02),
    "curve_spread": Scale(is_ratio=True, floor=0.02, matters=0.10),
    "lost_steps": Scale(is_ratio=False, floor=0.01, matters=0.05),
    "accuracy": Scale(is_ratio=False, floor=0.005, matters=0.0),
    # shares, too, with the built-in scorers; of a scorer with another range the same sizes count
    "reward": Scale(is_ratio=False, floor=0.01, matters=0.05),
}


@dataclass(frozen=True)
class PairTest:
    """Two variants in one measure before any correction; `difference` = worse - better, of logarithms for a ratio."""

    measure: ComparedMeasure
    better: str
    worse: str
    difference: float
    error: float
    freedom: int
    p_value: float
    own_error: float
    own_freedom: int
    own_p_value: float
    problem_error: float = 0.0


def block_tests(measure: ComparedMeasure, table: Table) -> list[PairTest]:
    """Test each pair of variants; less is better, but of rewards more. At least two variants and two seeds; values above 0 for a ratio."""
    scale = SCALES[measure]
    sign = -1 if measure == "reward" else 1
    logs = {name: [math.log(value) if scale.is_ratio else sign * value for value in values] for name, values in table.items()}
    error, freedom = _pooled(logs, scale.floor)
    return [_pair_test(measure, one, logs[one], other, logs[other], error, freedom) for one, other in combinations(logs, 2)]


def accuracy_tests(correct: Answers, base_correct: Answers) -> list[PairTest]:
    """Test each pair of variants, and each variant against the base model if `base_correct` is not empty; more is better."""
    floor = SCALES["accuracy"].floor
    wrong = {name: [1 - fmean(seed) for seed in seeds] for name, seeds in correct.items()}
    tests = []
    if len(wrong) > 1:
        error, freedom = _pooled(wrong, floor)
        for one, other in combinations(wrong, 2):
            test = _pair_test("accuracy", one, wrong[one], other, wrong[other], error, freedom)
            tests.append(_by_problem(test, correct[one], correct[other]))
    if base_correct:
        # the base model does not vary with the seed, so the seeds' part stays in what a variant's runs gain over it
        base_wrong = {name: [1 - fmean(seed) for seed in base_correct[name]] for name in wrong}
        gains = [[mine - base for mine, base in zip(wrong[name], base_wrong[name], strict=True)] for name in wrong]
        freedom = sum(len(values) - 1 for values in gains)
        rest = math.fsum((value - fmean(values)) ** 2 for values in gains for value in values)
        for name, values in wrong.items():
            error = max(math.sqrt(rest / freedom), floor) / math.sqrt(len(values))
            test = _pair_test("accuracy", name, values, BASE, base_wrong[name], error, freedom)
            tests.append(_by_problem(test, correct[name], base_correct[name]))
    return tests


def contrasts(tests: Sequence[PairTest]) -> tuple[Contrast, ...]:
    """Return one criterion's tests corrected, the surest first; intervals by Bonferroni, so wider than Holm's p would have them."""
    found: list[Contrast] = []
    adjusted, tail = 0.0, ALPHA / (2 * max(len(tests), 1) * NUM_CRITERIA)
    # one variant that varies more than the others makes a pair with each of them: with more variants there are more such pairs
    variants = {name for test in tests for name in (test.better, test.worse)} - {BASE}
    own_factor = NUM_CRITERIA * max(1.0, (len(variants) - 1) / 2)
    for rank, test in enumerate(sorted(tests, key=lambda test: test.p_value)):
        adjusted = min(max(adjusted, test.p_value * (len(tests) - rank) * NUM_CRITERIA), 1.0)
        p_value = min(max(adjusted, test.own_p_value * own_factor), 1.0)
        scale = SCALES[test.measure]
        half = max(
            float(student.isf(tail, test.freedom)) * test.error,
            float(student.isf(ALPHA / (2 * own_factor), test.own_freedom)) * test.own_error,
            float(normal.isf(tail)) * test.problem_error,
        )
        effect, low, high = (
            math.exp(value) if scale.is_ratio else value for value in (test.difference, test.difference - half, test.difference + half)
        )
        shown = p_value <= ALPHA and effect - scale.is_ratio >= scale.matters
        found.append(
            Contrast(
                measure=test.measure, better=test.better, worse=test.worse, effect=effect, low=low, high=high, p_value=p_value, shown=shown
            )
        )
    return tuple(sorted(found, key=lambda contrast: contrast.p_value))


def _pooled(table: Table, floor: float) -> tuple[float, int]:
    num_seeds = len(next(iter(table.values())))
    variant_means = {name: fmean(values) for name, values in table.items()}
    seed_means = [fmean(values[seed] for values in table.values()) for seed in range(num_seeds)]
    grand = fmean(seed_means)
    rest = [values[at] - variant_means[name] - seed_means[at] + grand for name, values in table.items() for at in range(num_seeds)]
    freedom = (len(table) - 1) * (num_seeds - 1)
    spread = max(math.sqrt(math.fsum(value * value for value in rest) / freedom), floor)
    return spread * math.sqrt(2 / num_seeds), freedom


def _pair_test(
    measure: ComparedMeasure, one: str, values: Sequence[float], other: str, other_values: Sequence[float], error: float, freedom: int
) -> PairTest:
    differences = [theirs - mine for mine, theirs in zip(values, other_values, strict=True)]
    difference, own_freedom = fmean(differences), len(differences) - 1
    better, worse = (one, other) if difference >= 0 else (other, one)
    own_error = max(stdev(differences), math.sqrt(2) * SCALES[measure].floor) / math.sqrt(len(differences))
    p_value, own_p_value = (
        float(2 * student.sf(abs(difference) / of, given)) for of, given in ((error, freedom), (own_error, own_freedom))
    )
    return PairTest(measure, better, worse, abs(difference), error, freedom, p_value, own_error, own_freedom, own_p_value)


def _by_problem(test: PairTest, mine: Sequence[Sequence[bool]], theirs: Sequence[Sequence[bool]]) -> PairTest:
    net = [sum(ours) - sum(others) for ours, others in zip(zip(*mine, strict=True), zip(*theirs, strict=True), strict=True)]
    exact = mcnemar(sum(value > 0 for value in net), sum(value < 0 for value in net))
    # a problem's answers go together over the seeds: the problem is the unit here, as the seed is above
    scale = math.sqrt(sum(value * value for value in net))
    by_mean = float(2 * normal.sf(abs(sum(net)) / scale)) if scale and BASE in {test.better, test.worse} else 0.0
    return replace(test, p_value=max(test.p_value, exact, by_mean), problem_error=scale / (len(net) * len(mine)))
