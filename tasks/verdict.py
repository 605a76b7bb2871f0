"""Say which variant is best for speed, memory, accuracy and stability, and overall, or that these runs cannot show it. Pure.

Best for a criterion is the variant shown to be better than every other (tasks.paired_tests says how, and how small a difference can be
seen). Best overall is the one left when accuracy, stability, speed and memory, in this order, have each taken out the variants that one
of those still left is shown to beat: time and memory do not buy a worse model. A variant of which a run ran out of memory, diverged or
failed is a row of the report and never best. GRPO's loss is about 0 on policy by construction and is not used.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean

from tasks.comparison_records import Criterion, Finding, MeasuredRun, RunMeasures, Verdict
from tasks.paired_tests import BASE, PairTest, accuracy_tests, block_tests, contrasts
from tasks.verdict_text import contrast_text, facts_text, joined, overall_text

MIN_STEPS = 100
MIN_SEEDS = 2
FAILED = frozenset({"out_of_memory", "skipped", "diverged", "failed"})
ORDER: tuple[Criterion, ...] = ("accuracy", "stability", "speed", "memory")

Runs = Mapping[str, Sequence[MeasuredRun]]  # per variant its runs, in the order of the seeds that all variants here share


def judge(runs: Sequence[MeasuredRun]) -> Verdict:
    """Return the verdict, whatever the order that `runs` come in; variants are named in the order in which they ran."""
    runs = sorted(runs, key=lambda run: run.order)
    compared = _compared(runs)
    measured = [run.measures.measured_steps for run in runs if run.measures]
    num_seeds = min((len(of_variant) for of_variant in compared.values()), default=0)
    if measured and (min(measured) < MIN_STEPS or (compared and num_seeds < MIN_SEEDS)):
        told = (
            f"Indicative only, and no verdict: the shortest run has {min(measured)} measured steps and the variants share {num_seeds} "
            f"{'seed' if num_seeds == 1 else 'seeds'}."
        )
        asked = f"A verdict takes {MIN_STEPS} measured steps or more in every run and {MIN_SEEDS} seeds or more."
        return Verdict(findings=(), sentences=(told, asked), indicative=True, best_overall=None)
    if not compared:
        told = f"No verdict: none of {joined(list(dict.fromkeys(run.variant for run in runs)))} finished every run."
        asked = "What happened to each is said in the table."
        return Verdict(findings=(), sentences=(told, asked), indicative=False, best_overall=None)
    findings = tuple(_finding(criterion, compared, runs) for criterion in ORDER)
    any_failed = any(_failed(run) for run in runs)
    left, taken_out = _narrowed(tuple(compared), findings)
    evaluated = {name: all(run.correct for run in of_variant) for name, of_variant in compared.items()}
    unknown = [name for name, whole in evaluated.items() if not whole and any(evaluated.values())]
    best = left[0] if len(left) == 1 and (len(compared) > 1 or any_failed) and not unknown else None
    missing = list(dict.fromkeys(run.variant for run in runs if run.variant not in compared))
    sentences = overall_text(best, left, taken_out, missing, findings, f"{num_seeds} seeds, {min(measured)} or more measured steps a run")
    if unknown:
        why = "was not evaluated in every run, and time and memory do not buy a worse model"
        told = f"No variant is best overall: {joined(unknown)} {why}."
        sentences = (told, sentences[1])
    return Verdict(findings=findings, sentences=sentences, indicative=False, best_overall=best)


def _failed(run: MeasuredRun) -> bool:
    return run.status in FAILED and not run.refused


def _compared(runs: Sequence[MeasuredRun]) -> Runs:
    # a run that was cancelled takes its seed out for all, so that variants are compared over the same seeds
    failed = {run.variant for run in runs if _failed(run)}
    by_variant: dict[str, dict[int, MeasuredRun]] = {}
    for run in runs:
        if run.measures and run.status == "succeeded" and run.variant not in failed:
            by_variant.setdefault(run.variant, {})[run.seed] = run
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in by_variant.values()))) if by_variant else []
    return {variant: [by_seed[seed] for seed in seeds] for variant, by_seed in by_variant.items()}


def _narrowed(variants: tuple[str, ...], findings: tuple[Finding, ...]) -> tuple[tuple[str, ...], dict[Criterion, list[str]]]:
    left, taken_out = variants, dict[Criterion, list[str]]()
    for finding in findings:
        beaten = finding.beaten_by(left)
        kept = tuple(variant for variant in left if variant not in beaten)
        if kept and kept != left:
            taken_out[finding.criterion] = [variant for variant in left if variant in beaten]
            left = kept
    return left, taken_out


def _finding(criterion: Criterion, compared: Runs, runs: Sequence[MeasuredRun]) -> Finding:
    variants = tuple(compared)
    found = contrasts(_tests(criterion, compared))
    pairs = [contrast for contrast in found if BASE not in {contrast.better, contrast.worse}]
    shown = {(contrast.better, contrast.worse) for contrast in pairs if contrast.shown}
    beaten = {worse for _, worse in shown}
    best = next((one for one in variants if one not in beaten and all((one, other) in shown for other in variants if other != one)), None)
    if len(variants) == 1:
        best = variants[0] if criterion == "stability" and any(_failed(run) for run in runs) else None
    # the next best is the one that is least surely worse: effects of two measures, ratio and difference, have no common order
    winning = [contrast for contrast in pairs if contrast.shown and contrast.better == best]
    decides = max(winning, key=lambda contrast: contrast.p_value) if winning else next(iter(pairs), None)
    parts = [_head(criterion, best, bool(pairs), bool(shown)), facts_text(criterion, compared, runs)]
    parts += [contrast_text(contrast) for contrast in pairs if contrast.shown]
    parts += (
        [f"between {one} and {other} no difference that these runs can show" for one, other in _open_pairs(variants, shown)]
        if shown
        else []
    )
    parts += [f"the nearest to one: {contrast_text(pairs[0])}"] if pairs and not shown else []
    parts += [contrast_text(contrast) for contrast in found if contrast not in pairs]
    return Finding(
        criterion=criterion,
        best=best,
        sentence="; ".join(part for part in parts if part) + ".",
        effect=decides.effect if decides else None,
        low=decides.low if decides else None,
        high=decides.high if decides else None,
        p_value=decides.p_value if decides else None,
        contrasts=found,
    )


def _head(criterion: Criterion, best: str | None, tested: bool, any_shown: bool) -> str:
    if best:
        return f"Best for {criterion}: {best}"
    if not tested:
        return f"Best for {criterion}: nothing to compare"
    return f"Best for {criterion}: {'no single variant' if any_shown else 'no difference that these runs can show'}"


def _open_pairs(variants: tuple[str, ...], shown: set[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(one, other) for one, other in combinations(variants, 2) if not {(one, other), (other, one)} & shown]


def _tests(criterion: Criterion, compared: Runs) -> list[PairTest]:
    if criterion == "accuracy":
        return _accuracy_tests(compared)
    if len(compared) < 2:
        return []
    if criterion == "speed":
        return block_tests("step_time", _table(compared, "step_time_ms"))
    if criterion == "memory":
        return block_tests("peak_memory", _table(compared, "peak_memory_mb"))
    # one figure a run: the geometric mean of the spreads of those curves that vary in every run
    spreads = [_table(compared, name) for name in ("reward_spread", "entropy_spread", "grad_norm_spread")]
    varying = [table for table in spreads if all(value > 0 for values in table.values() for value in values)]
    tests: list[PairTest] = []
    if varying:
        seeds = range(len(next(iter(compared.values()))))
        means = {name: [math.exp(fmean(math.log(table[name][seed]) for table in varying)) for seed in seeds] for name in compared}
        tests += block_tests("curve_spread", means)
    lost = {name: [measures.lost_share for measures in _measures(of_variant)] for name, of_variant in compared.items()}
    if any(share for shares in lost.values() for share in shares):
        tests += block_tests("lost_steps", lost)
    return tests


def _accuracy_tests(compared: Runs) -> list[PairTest]:
    runs = [run for of_variant in compared.values() for run in of_variant]
    if not all(run.correct for run in runs) or len({len(run.correct) for run in runs}) != 1:
        return []
    correct = {name: [run.correct for run in of_variant] for name, of_variant in compared.items()}
    base = {name: [run.base_correct for run in of_variant] for name, of_variant in compared.items()}
    return accuracy_tests(correct, base if all(run.base_correct for run in runs) else {})


def _measures(runs: Sequence[MeasuredRun]) -> list[RunMeasures]:
    return [run.measures for run in runs if run.measures]


def _table(compared: Runs, name: str) -> dict[str, list[float]]:
    return {variant: [getattr(measures, name) or 0.0 for measures in _measures(runs)] for variant, runs in compared.items()}
