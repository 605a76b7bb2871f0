"""The verdict over runs that a machine made, resampled: an earlier comparison of params/compare.yaml, made while the machine was quiet."""

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tasks.comparison_records import MeasuredRun
from tasks.measures import Steps, run_measures
from tasks.records import Outcome
from tasks.verdict import judge

STEPS_FILE = Path(__file__).resolve().parent / "fixtures/compare_cpu_quiet_steps.csv"
NUM_COMPARISONS, NUM_SEEDS, WARMUP_STEPS = 200, 3, 5
# steps that are taken together, and how far from their place: longer than what one step has to do with the next
BLOCK, SHIFT = 10, 5
DONE = Outcome(status="succeeded")
Plants = Mapping[str, Mapping[str, float]]


@pytest.fixture(scope="module")
def real_runs() -> dict[str, list[Steps]]:
    """The steps of three runs of each variant."""
    runs: dict[str, dict[str, Steps]] = {}
    with STEPS_FILE.open(newline="") as lines:
        for row in csv.DictReader(lines):
            variant, seed = row.pop("variant"), row.pop("seed")
            runs.setdefault(variant, {}).setdefault(seed, []).append({name: float(value) for name, value in row.items() if value})
    return {variant: list(by_seed.values()) for variant, by_seed in runs.items()}


def resampled(rng: np.random.Generator, runs: list[Steps], plant: Mapping[str, float]) -> Steps:
    """Return a run as one of `runs` could have been: blocks of its steps from about their place, so that its trend stays."""
    run = runs[rng.integers(len(runs))]
    measured, peak, steps = run[WARMUP_STEPS:], run[-1]["peak_memory_mb"], list(run[:WARMUP_STEPS])
    for start in range(0, len(measured), BLOCK):
        at = int(np.clip(start + rng.integers(-SHIFT, SHIFT + 1), 0, len(measured) - BLOCK))
        steps += measured[at : at + BLOCK]
    return [
        {**{name: value * plant.get(name, 1.0) for name, value in step.items()}, "peak_memory_mb": peak * plant.get("peak_memory_mb", 1.0)}
        for step in steps
    ]


def comparison(number: int, runs: list[Steps], plants: Plants) -> list[MeasuredRun]:
    """Return a comparison of variants that are all made from the runs of one."""
    rng, names = np.random.default_rng(number), list(plants)
    return [
        MeasuredRun(
            variant=name,
            seed=seed,
            order=seed * len(names) + place,
            status="succeeded",
            measures=run_measures(resampled(rng, runs, plants[name]), WARMUP_STEPS, DONE),
        )
        for seed in range(NUM_SEEDS)
        for place, name in enumerate(names)
    ]


@pytest.mark.parametrize("variant", ["bf16", "fp16", "fp32"])
def test_equal_variants_made_from_one_variants_runs_raise_few_false_alarms(variant: str, real_runs: dict[str, list[Steps]]) -> None:
    alarms = 0
    for number in range(NUM_COMPARISONS):
        verdict = judge(comparison(number, real_runs[variant], {"one": {}, "other": {}}))
        alarms += bool(verdict.best_overall) or any(contrast.shown for found in verdict.findings for contrast in found.contrasts)
    assert alarms <= 0.05 * NUM_COMPARISONS


@pytest.mark.parametrize("variant", ["bf16", "fp16", "fp32"])
def test_a_planted_difference_in_time_and_memory_is_found(variant: str, real_runs: dict[str, list[Steps]]) -> None:
    """Of three variants one is 25 % slower and one takes 25 % more memory; equal runs differ by up to 4 % in both."""
    plants = {"usual": {}, "slow": {"step_time_ms": 1.25}, "large": {"peak_memory_mb": 1.25}}
    found = dict.fromkeys([("step_time", "slow"), ("peak_memory", "large")], 0)
    for number in range(NUM_COMPARISONS):
        verdict = judge(comparison(number, real_runs[variant], plants))
        shown = {(one.measure, one.better, one.worse) for each in verdict.findings for one in each.contrasts if one.shown}
        for measure, worse in found:
            found[measure, worse] += (measure, "usual", worse) in shown
    assert min(found.values()) >= 0.95 * NUM_COMPARISONS
