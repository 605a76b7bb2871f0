"""Say which variant is best for speed, memory, accuracy and stability, and overall, or that these runs cannot show it. Pure.

Best for a criterion is the variant shown to be better than every other (tasks.paired_tests says how, and how small a difference can be
seen). Of two variants the first of accuracy, stability, speed and memory, in this order, that shows a difference decides, and best overall
is the one that is ahead of every other in this way: time and memory do not buy a worse model. Accuracy is that of the held-out problems
and the reward at the end of training, which shows a model that gave up where a few dozen problems over a few seeds cannot. Nothing is
best without an evaluation, nor below the base model, and a variant whose reward is lower is ahead in nothing but accuracy. A variant of
which a run ran out of memory or diverged is a row of the report and never best; that is counted, not tested, so that one that is left
alone is not called the best. What fails or is cancelled for another reason says nothing of the variant and takes its seed out for all.
GRPO's loss is about 0 on policy by construction and is not used.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean, stdev

from scipy.stats import t as student

from tasks.comparison_records import Contrast, Criterion, Finding, MeasuredRun, RunMeasures, Verdict
from tasks.paired_tests import BASE, PairTest, accuracy_tests, block_tests, contrasts
from tasks.verdict_text import Standing, contrast_text, dropped_texts, facts_text, joined, missing_texts, overall_text

MIN_STEPS = 100
MIN_SEEDS = 2
OWN_FAILURES = frozenset({"out_of_memory", "skipped", "diverged"})
SPREADS = {"reward_spread": "reward", "entropy_spread": "entropy", "grad_norm_spread": "gradient norm"}
# contrasts in one sentence
MOST_SAID = 6
# one-sided, uncorrected: what it takes to say that a reward is lower, which only ever takes a claim back
REWARD_ALPHA = 0.01
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
            f"Indicative only, and no verdict: the shortest run has {min(measured)} measured steps, and {num_seeds} "
            f"{'seed is' if num_seeds == 1 else 'seeds are'} common to all variants that finished."
        )
        asked = f"A verdict takes {MIN_STEPS} measured steps or more in every run and {MIN_SEEDS} seeds or more."
        lost = "; ".join([*missing_texts(runs, compared), *dropped_texts(runs, compared)])
        return Verdict(findings=(), sentences=(told, f"{asked[:-1]}; {lost}." if lost else asked), indicative=True, best_overall=None)
    if not compared:
        told = f"No verdict: none of {joined(list(dict.fromkeys(run.variant for run in runs)))} finished every run."
        return Verdict(findings=(), sentences=(told, "What happened to each is said in the table."), indicative=False, best_overall=None)
    findings = tuple(_finding(criterion, compared, runs) for criterion in ORDER)
    standing = _standing(compared, findings, runs)
    said = overall_text(standing, findings, f"{num_seeds} seeds, {min(measured)} or more measured steps a run")
    return Verdict(
        findings=findings, sentences=said, indicative=False, best_overall=standing.best, only_finished=standing.only, left=standing.left
    )


def _standing(compared: Runs, findings: Sequence[Finding], runs: Sequence[MeasuredRun]) -> Standing:
    variants = tuple(compared)
    worse: dict[str, list[str]] = {}
    for name in variants:
        decided = [criterion for other in variants if (criterion := _ahead(other, name, findings))]
        if decided:
            worse.setdefault(min(decided, key=ORDER.index), []).append(name)
    ruined = [name for name in variants if findings[0].beats(BASE, name)]
    left = tuple(name for name in variants if name not in {*ruined, *(each for names in worse.values() for each in names)})
    unknown = [] if _evaluated(compared) else [name for name in variants if not all(run.correct for run in compared[name])] or [*variants]
    ahead_of_all = [one for one in left if len(variants) > 1 and all(_ahead(one, other, findings) for other in variants if other != one)]
    # one that is left because another's disk was full is left by chance
    others = {run.variant: run for run in runs if run.variant not in compared and not run.refused}
    failed = {run.variant for run in runs if run.status in OWN_FAILURES}
    only = left[0] if left and len(variants) == 1 and others and failed == set(others) else None
    reasons = [f"{joined(names)} shown worse in {criterion}" for criterion, names in worse.items()]
    reasons += [f"{joined(ruined)} shown worse than the base model"] if ruined else []
    reasons += [*missing_texts(runs, compared), *dropped_texts(runs, compared)]
    best = ahead_of_all[0] if ahead_of_all and not unknown else None
    return Standing(variants=variants, best=best, only=only, left=left, unknown=tuple(unknown), reasons=tuple(reasons))


def _ahead(one: str, other: str, findings: Sequence[Finding]) -> Criterion | None:
    """Return the criterion that puts `one` ahead of `other`; None: none does, or an earlier one puts it behind."""
    for finding in findings:
        if finding.beats(one, other):
            return finding.criterion
        if finding.beats(other, one):
            return None
    return None


def _compared(runs: Sequence[MeasuredRun]) -> Runs:
    # a run that says nothing of its variant takes its seed out for all, so that variants are compared over the same seeds
    out = {run.variant for run in runs if run.status in OWN_FAILURES}
    by_variant: dict[str, dict[int, MeasuredRun]] = {}
    for run in runs:
        if run.measures and run.status == "succeeded" and run.variant not in out:
            by_variant.setdefault(run.variant, {})[run.seed] = run
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in by_variant.values()))) if by_variant else []
    return {variant: [by_seed[seed] for seed in seeds] for variant, by_seed in by_variant.items()}


def _finding(criterion: Criterion, compared: Runs, runs: Sequence[MeasuredRun]) -> Finding:
    variants = tuple(compared)
    found = contrasts(_tests(criterion, compared))
    if criterion != "accuracy":
        found = tuple(_without_lower_reward(contrast, compared) for contrast in found)
    pairs = [contrast for contrast in found if BASE not in {contrast.better, contrast.worse}]
    shown = {(contrast.better, contrast.worse) for contrast in pairs if contrast.shown}
    split = {(one, other) for one, other in shown if (other, one) in shown}
    best = next((one for one in variants if shown and all((one, other) in shown - split for other in variants if other != one)), None)
    # the next best is the one that is least surely worse: effects of two measures, ratio and difference, have no common order
    winning = [contrast for contrast in pairs if contrast.shown and contrast.better == best]
    decides = max(winning, key=lambda contrast: contrast.p_value) if winning else next(iter(pairs), None)
    parts = [_head(criterion, best, bool(pairs), bool(shown)), facts_text(criterion, compared, runs)]
    if criterion == "stability" and len(variants) > 1:
        counted = joined([SPREADS[name] for name in _varying(compared)])
        parts.append(f"compared by the curves of {counted}" if counted else "no curve varies in every run")
    parts += _some([contrast_text(contrast) for contrast in pairs if contrast.shown])
    parts += [
        f"between {one} and {other} one measure speaks against the other"
        for one, other in combinations(variants, 2)
        if (one, other) in split
    ]
    if shown:
        parts += _some([f"between {one} and {other} no difference that these runs can show" for one, other in _open_pairs(variants, shown)])
    parts += [f"the surest of them: {contrast_text(pairs[0])}"] if pairs and not shown else []
    parts += [contrast_text(contrast) for contrast in found if contrast not in pairs]
    sentence = "; ".join(part for part in parts if part) + "."
    return Finding(criterion=criterion, best=best, sentence=sentence, decides=decides, contrasts=found)


def _head(criterion: Criterion, best: str | None, tested: bool, any_shown: bool) -> str:
    if best:
        return f"Best for {criterion}: {best}"
    untold = "no single variant" if any_shown else "no difference that these runs can show"
    return f"Best for {criterion}: {untold if tested else 'nothing to compare'}"


def _some(texts: list[str]) -> list[str]:
    return [*texts[:MOST_SAID], f"{len(texts) - MOST_SAID} more in the table"] if len(texts) > MOST_SAID else texts


def _open_pairs(variants: tuple[str, ...], shown: set[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(one, other) for one, other in combinations(variants, 2) if not {(one, other), (other, one)} & shown]


def _tests(criterion: Criterion, compared: Runs) -> list[PairTest]:
    if criterion == "accuracy":
        # a reward is no accuracy by itself: it is earned on training prompts
        return [*_accuracy_tests(compared), *_reward_tests(compared)] if _evaluated(compared) else []
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


def _without_lower_reward(contrast: Contrast, compared: Runs) -> Contrast:
    """Return a contrast as not shown if the better variant's reward is lower: a policy that gave up varies little and is soon done."""
    rewards = _table(compared, "reward")
    leads = [theirs - ours for ours, theirs in zip(rewards[contrast.better], rewards[contrast.worse], strict=True)]
    lead, error = fmean(leads), stdev(leads) / math.sqrt(len(leads))
    lower = lead > 0 and (error == 0 or student.sf(lead / error, len(leads) - 1) <= REWARD_ALPHA)
    return contrast.model_copy(update={"lower_reward": True, "shown": False}) if lower else contrast


def _evaluated(compared: Runs) -> bool:
    sizes = {len(run.correct) for of_variant in compared.values() for run in of_variant}
    return 0 not in sizes and len(sizes) == 1


def _accuracy_tests(compared: Runs) -> list[PairTest]:
    runs = [run for of_variant in compared.values() for run in of_variant]
    correct = {name: [run.correct for run in of_variant] for name, of_variant in compared.items()}
    base = {name: [run.base_correct for run in of_variant] for name, of_variant in compared.items()}
    return accuracy_tests(correct, base if all(run.base_correct for run in runs) else {})


def _reward_tests(compared: Runs) -> list[PairTest]:
    known = all(measures.reward is not None for of_variant in compared.values() for measures in _measures(of_variant))
    return block_tests("reward", _table(compared, "reward")) if known and len(compared) > 1 else []


def _measures(runs: Sequence[MeasuredRun]) -> list[RunMeasures]:
    return [run.measures for run in runs if run.measures]


def _table(compared: Runs, name: str) -> dict[str, list[float]]:
    return {variant: [getattr(measures, name) or 0.0 for measures in _measures(runs)] for variant, runs in compared.items()}
