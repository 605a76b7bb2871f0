"""Say which variant is best for speed, memory, accuracy and stability, and overall, or that these runs cannot show it. Pure.

Best for a criterion is the variant shown to be better than every other (tasks.paired_tests says how, and how small a difference can be
seen). Best overall is the one left when accuracy, stability, speed and memory, in this order, have each taken out the variants that one
of those still left is shown to beat: time and memory do not buy a worse model. A variant of which a run ran out of memory or diverged is
a row of the report and never best; that is counted, not tested, so that one that is left alone is called the only one that finished, and
not the best. What fails or is cancelled for another reason says nothing of the variant and takes its seed out for all. GRPO's loss is
about 0 on policy by construction and is not used.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean

from tasks.comparison_records import Contrast, Criterion, Finding, MeasuredRun, RunMeasures, Verdict
from tasks.paired_tests import BASE, PairTest, accuracy_tests, block_tests, contrasts
from tasks.verdict_text import contrast_text, facts_text, joined, missing_texts, overall_text

MIN_STEPS = 100
MIN_SEEDS = 2
OWN_FAILURES = frozenset({"out_of_memory", "skipped", "diverged"})
SPREADS = {"reward_spread": "reward", "entropy_spread": "entropy", "grad_norm_spread": "gradient norm"}
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
    left, taken_out = _narrowed(tuple(compared), findings)
    evaluated = {name: all(run.correct for run in of_variant) for name, of_variant in compared.items()}
    unknown = [name for name, whole in evaluated.items() if not whole and any(evaluated.values())]
    best = left[0] if len(left) == 1 and len(compared) > 1 and not unknown else None
    only = left[0] if len(compared) == 1 and any(run.status in OWN_FAILURES for run in runs) else None
    rests_on = f"{num_seeds} seeds, {min(measured)} or more measured steps a run"
    sentences = overall_text(best, only, left, taken_out, missing_texts(runs, compared), findings, rests_on)
    if unknown:
        why = "was not evaluated in every run, and time and memory do not buy a worse model"
        told = f"No variant is best overall: {joined(unknown)} {why}."
        sentences = (told, sentences[1])
    return Verdict(findings=findings, sentences=sentences, indicative=False, best_overall=best, only_finished=only)


def _compared(runs: Sequence[MeasuredRun]) -> Runs:
    # a run that says nothing of its variant takes its seed out for all, so that variants are compared over the same seeds
    out = {run.variant for run in runs if run.status in OWN_FAILURES}
    by_variant: dict[str, dict[int, MeasuredRun]] = {}
    for run in runs:
        if run.measures and run.status == "succeeded" and run.variant not in out:
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
    found = tuple(_without_collapsed(contrast, compared) for contrast in contrasts(_tests(criterion, compared)))
    pairs = [contrast for contrast in found if BASE not in {contrast.better, contrast.worse}]
    shown = {(contrast.better, contrast.worse) for contrast in pairs if contrast.shown}
    best = next((one for one in variants if shown and all((one, other) in shown for other in variants if other != one)), None)
    # the next best is the one that is least surely worse: effects of two measures, ratio and difference, have no common order
    winning = [contrast for contrast in pairs if contrast.shown and contrast.better == best]
    decides = max(winning, key=lambda contrast: contrast.p_value) if winning else next(iter(pairs), None)
    parts = [_head(criterion, best, bool(pairs), bool(shown)), facts_text(criterion, compared, runs)]
    if criterion == "stability" and len(variants) > 1:
        counted = joined([SPREADS[name] for name in _varying(compared)])
        parts.append(f"compared by the curves of {counted}" if counted else "no curve varies in every run")
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
    tests: list[PairTest] = []
    if varying := [_table(compared, name) for name in _varying(compared)]:
        # one figure a run: the geometric mean of the spreads
        seeds = range(len(next(iter(compared.values()))))
        means = {name: [math.exp(fmean(math.log(table[name][seed]) for table in varying)) for seed in seeds] for name in compared}
        tests += block_tests("curve_spread", means)
    lost = {name: [measures.lost_share for measures in _measures(of_variant)] for name, of_variant in compared.items()}
    if any(share for shares in lost.values() for share in shares):
        tests += block_tests("lost_steps", lost)
    return tests


def _varying(compared: Runs) -> list[str]:
    return [name for name in SPREADS if all(value > 0 for values in _table(compared, name).values() for value in values)]


def _without_collapsed(contrast: Contrast, compared: Runs) -> Contrast:
    """Return a contrast of spreads as not shown if the narrower curves have the lower reward: a policy that gave up varies little."""
    if contrast.measure != "curve_spread":
        return contrast
    rewards, spreads = _table(compared, "reward"), _table(compared, "reward_spread")
    lower = fmean(rewards[contrast.worse]) - fmean(rewards[contrast.better])
    step_noise = max(fmean(spreads[contrast.worse]), fmean(spreads[contrast.better]))
    return contrast.model_copy(update={"collapsed": True, "shown": False}) if lower > step_noise else contrast


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
