"""Measure one run from the lines of its ``metrics.jsonl`` and its outcome. Pure."""

import math
from itertools import accumulate
from statistics import fmean, median

from tasks.comparison_records import RunMeasures
from tasks.memory import MB
from tasks.program_request import ModelAnswers
from tasks.records import Accuracy, Outcome

Steps = list[dict[str, float]]
CURVES = ("loss", "reward", "entropy", "grad_norm")
# the trend that is taken out of a curve is its moving mean over this share of the steps, as is the end that a reward is the mean of
TREND_SHARE = 5


def run_measures(steps: Steps, warmup_steps: int, outcome: Outcome, accuracy: Accuracy | None = None) -> RunMeasures:
    """Return the measures of a run that succeeded; `steps` are all of tasks.attempt_files.read_steps, more than the warm-up."""
    measured = steps[warmup_steps:]
    # the process' own peak covers what no step saw, such as a save
    peak = outcome.peak_memory_bytes / MB if outcome.peak_memory_bytes is not None else max(_finite(steps, "peak_memory_mb"))
    times = _finite(measured, "step_time_ms")
    last = _finite(measured[-max(len(measured) // TREND_SHARE, 1) :], "reward")
    kl, rms, largest = (_finite(measured, f"mismatch_{name}") for name in ("kl", "rms", "max"))
    return RunMeasures(
        warmup_steps=warmup_steps,
        measured_steps=len(measured),
        step_time_ms=median(times),
        step_time_ms_p95=sorted(times)[math.ceil(0.95 * len(times)) - 1],
        forward_backward_time_ms=median(_finite(measured, "forward_backward_time_ms")),
        rollout_time_ms=median(_finite(measured, "rollout_time_ms")),
        tokens_per_second=median(_finite(measured, "tokens_per_second")),
        peak_memory_mb=peak,
        peak_memory_mb_by_device=tuple(size / MB for size in outcome.peak_memory_by_device),
        reward=fmean(last) if last else None,
        reward_spread=detrended_spread(_finite(measured, "reward")),
        entropy_spread=detrended_spread(_finite(measured, "entropy")),
        grad_norm_spread=detrended_spread([math.log(norm) for norm in _finite(measured, "grad_norm") if norm > 0]),
        skipped_steps=sum(step.get("step_skipped") == 1.0 for step in steps),
        lowest_loss_scale=min((step["loss_scale"] for step in steps if "loss_scale" in step), default=None),
        nan_events=sum(_not_finite(step) for step in steps),
        mismatch_kl=median(kl) if kl else None,
        mismatch_rms=median(rms) if rms else None,
        mismatch_max=max(largest) if largest else None,
        accuracy=accuracy,
    )


def detrended_spread(curve: list[float]) -> float | None:
    """Return the standard deviation of a curve about its moving mean; None for fewer than three points.

    The window is a fifth of the curve and symmetric, narrower at the ends, so that neither a steady rise nor a slow bend counts.
    """
    if len(curve) < 3:
        return None
    half = max(len(curve) // (2 * TREND_SHARE), 1)
    reach = [min(half, at, len(curve) - 1 - at) for at in range(len(curve))]
    sums = [0.0, *accumulate(curve)]
    trend = [(sums[at + width + 1] - sums[at - width]) / (2 * width + 1) for at, width in enumerate(reach)]
    # the two ends are their own trend
    rest = [value - mean for value, mean in zip(curve[1:-1], trend[1:-1], strict=True)]
    return math.sqrt(math.fsum(value * value for value in rest) / len(rest))


def correct_answers(answers: ModelAnswers, threshold: float) -> tuple[bool, ...]:
    """Return which problems were solved, as MeasuredRun holds them."""
    return tuple(answer.score >= threshold for answer in answers.answers)


def _finite(steps: Steps, name: str) -> list[float]:
    return [step[name] for step in steps if name in step and math.isfinite(step[name])]


def _not_finite(step: dict[str, float]) -> bool:
    # a skipped step's gradients are not finite by definition; it is counted as skipped
    watched = ("reward",) if step.get("step_skipped") == 1.0 else CURVES
    return any(name in step and not math.isfinite(step[name]) for name in watched)
