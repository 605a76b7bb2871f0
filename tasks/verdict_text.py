"""Put a verdict into words, with its figures. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tasks.comparison_records import Contrast, Criterion, Finding, MeasuredRun
from tasks.paired_tests import ALPHA, BASE, SCALES
from tasks.records import Status

Runs = Mapping[str, Sequence[MeasuredRun]]
ENDED: dict[Status, str] = {
    "out_of_memory": "ran out of memory",
    "skipped": "was not tried for want of memory",
    "diverged": "diverged",
    "failed": "failed",
    "cancelled": "was cut off",
}


@dataclass(frozen=True)
class Standing:
    """How the variants that were compared stand to each other."""

    variants: tuple[str, ...]
    best: str | None
    only: str | None
    left: tuple[str, ...]
    unknown: tuple[str, ...]
    reasons: tuple[str, ...]


def joined(names: Sequence[str]) -> str:
    """Return names as people say them: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def contrast_text(contrast: Contrast) -> str:
    """Return what two variants differ by, with interval and p."""
    better, worse, scale = contrast.better, contrast.worse, SCALES[contrast.measure]
    factor, digits, unit = (1, 2, " times") if scale.is_ratio else (1, 3, "") if contrast.measure == "reward" else (100, 1, " points")
    size = f"{factor * contrast.effect:.{digits}f}{unit}"
    said = {
        "step_time": f"{worse} takes {size} the step time of {better}",
        "peak_memory": f"{worse} takes {size} the peak memory of {better}",
        "curve_spread": f"the curves of {worse} spread {size} as wide as those of {better}",
        "lost_steps": f"{worse} loses {size} more of its steps than {better}",
        "accuracy": f"{better} solves {size} more of the problems than {worse}",
        "reward": f"{better} ends at a reward {size} above that of {worse}",
    }[contrast.measure]
    interval = f"{factor * contrast.low:.{digits}f} to {factor * contrast.high:.{digits}f}"
    p_value = "p < 0.001" if contrast.p_value < 0.001 else f"p = {contrast.p_value:.2g}"
    significant = contrast.p_value <= ALPHA and not contrast.shown
    lower = f", not counted since the reward of {better} is lower" if contrast.lower_reward else ""
    why_not = lower or (", too little to matter" if significant else "")
    return f"{said} ({interval}; {p_value}{why_not})"


def facts_text(criterion: Criterion, compared: Runs, runs: Sequence[MeasuredRun]) -> str:
    """Return the figures a finding rests on: a variant's mean over its seeds; for stability and memory what went wrong."""
    if criterion == "stability":
        lost = (_lost_text(name, of_variant) for name, of_variant in compared.items())
        return "; ".join([*filter(None, lost), *_failures(runs, "diverged")])
    means = {name: _mean(criterion, of_variant) for name, of_variant in compared.items()}
    unit = {"accuracy": "% of the held-out problems", "speed": "ms a step", "memory": "MB at the peak"}[criterion]
    known = {name: value for name, value in means.items() if value is not None}
    figures = [f"{name} {value:.1f}" if criterion == "accuracy" else f"{name} {value:,.0f}" for name, value in known.items()]
    failures = _failures(runs, "out_of_memory", "skipped") if criterion == "memory" else []
    return "; ".join([*([f"{joined(figures)} {unit}"] if figures else []), *failures])


def missing_texts(runs: Sequence[MeasuredRun], compared: Runs) -> list[str]:
    """Return what kept each variant that is not compared from it, such as 'fp16 diverged in 1 of 3 runs'."""
    texts = []
    for name in dict.fromkeys(run.variant for run in runs if run.variant not in compared):
        own = [run for run in runs if run.variant == name]
        if any(run.refused for run in own):
            texts.append(f"{name} is refused by this machine")
            continue
        counts = Counter(ENDED[run.status] for run in own if run.status != "succeeded")
        texts.append(f"{name} {joined([f'{how} in {count}' for how, count in counts.items()])} of {len(own)} runs")
    return texts


def dropped_texts(runs: Sequence[MeasuredRun], compared: Runs) -> list[str]:
    """Return which seeds are left out and why, such as 'seed 2 left out, since fp16 failed in it'."""
    return [
        f"seed {run.seed} left out, since {run.variant} {ENDED[run.status]} in it"
        for run in runs
        if run.variant in compared and run.status != "succeeded"
    ]


def overall_text(standing: Standing, findings: Sequence[Finding], rests_on: str) -> tuple[str, str]:
    """Return the two sentences of a report's head: which variant and why; what is best for each criterion, and how sure that is."""
    reasons = "; ".join(standing.reasons)
    if standing.best:
        first = f"{standing.best} is best overall: {reasons}"
    elif standing.only:
        only = f"{standing.only} is the only one that neither ran out of memory nor diverged"
        first = f"No variant is shown best, but {only}: {reasons} (counted, not tested)"
    else:
        first = "; ".join(filter(None, [f"No variant is best overall: {_why_none(standing)}", reasons]))
    if all(BASE in {contrast.better, contrast.worse} for finding in findings for contrast in finding.contrasts):
        return f"{first}.", f"No variant was tested against another ({rests_on})."
    by_criterion = "; for ".join(f"{finding.criterion}: {_best_text(finding)}" for finding in findings)
    return f"{first}.", f"Best for {by_criterion} (95 % confidence over all of it; {rests_on})."


def _why_none(standing: Standing) -> str:
    variants, left = standing.variants, standing.left
    if standing.unknown:
        were = "was" if len(standing.unknown) == 1 else "were"
        untested = f"{joined(standing.unknown)} {were} not evaluated on the same problems in every run"
        return f"{untested}, and time and memory do not buy a worse model"
    if len(variants) == 1:
        return f"{variants[0]} alone was measured"
    if len(left) > 1:
        return f"between {joined(left)} no difference that these runs can show"
    return f"{left[0]} is not shown to be ahead of every other" if left else "none is left"


def _best_text(finding: Finding) -> str:
    if finding.best:
        return finding.best
    shown = [contrast for contrast in finding.contrasts if contrast.shown and BASE not in {contrast.better, contrast.worse}]
    unbeaten = {contrast.better for contrast in shown} - {contrast.worse for contrast in shown}
    return " or ".join(sorted(unbeaten)) or "none shown"


def _mean(criterion: Criterion, runs: Sequence[MeasuredRun]) -> float | None:
    measures = [run.measures for run in runs if run.measures]
    if criterion == "speed":
        return fmean(measure.step_time_ms for measure in measures)
    if criterion == "memory":
        return fmean(measure.peak_memory_mb for measure in measures)
    return 100 * fmean(fmean(run.correct) for run in runs) if all(run.correct for run in runs) else None


def _lost_text(name: str, runs: Sequence[MeasuredRun]) -> str:
    measures = [run.measures for run in runs if run.measures]
    skipped, not_finite = ([getattr(measure, what) for measure in measures] for what in ("skipped_steps", "nan_events"))
    scales = [measure.lowest_loss_scale for measure in measures if measure.lowest_loss_scale is not None]
    parts = [f"skipped {_steps(skipped)} a run"] if any(skipped) else []
    parts += [f"had {_steps(not_finite)} a run with numbers that are not finite"] if any(not_finite) else []
    # a scale falls at a skipped step alone
    parts += [f"lowered its loss scale to {min(scales):,.6g}"] if scales and any(skipped) else []
    return f"{name} {joined(parts)}" if parts else ""


def _steps(counts: Sequence[int]) -> str:
    number = str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"{number} {'step' if number == '1' else 'steps'}"


def _failures(runs: Sequence[MeasuredRun], *statuses: Status) -> list[str]:
    return [f"{run.variant} with seed {run.seed} {run.what_happened}" for run in runs if run.status in statuses]
