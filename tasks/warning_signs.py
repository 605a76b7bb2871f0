"""What a run can live with and its reader must know, read from the steps' metrics. Pure; used while a run goes on and at its end."""

from collections.abc import Callable

from tasks.records import TrainingWarning

Step = dict[str, float]
COLLAPSED_SCALE = 1.0

_SIGNS: dict[str, tuple[Callable[[Step], bool], str]] = {
    "clipped_completions": (
        lambda step: step.get("completions/clipped_ratio") == 1.0,
        "every completion was cut at training.max_completion_length, so none was rewarded for its end",
    ),
    "no_signal": (lambda step: step.get("frac_reward_zero_std") == 1.0, "no group's completions differed in reward: nothing to learn from"),
    "skipped_steps": (lambda step: step.get("step_skipped") == 1.0, "the optimizer step was skipped for non-finite gradients"),
    "loss_scale_collapsed": (
        lambda step: step.get("loss_scale", COLLAPSED_SCALE) < COLLAPSED_SCALE,
        "the loss scale fell below 1: gradients overflow fp16 without any scaling",
    ),
}


def warning_signs(steps: list[Step]) -> tuple[TrainingWarning, ...]:
    """Return each sign that some of `steps` show, with the first step and how many there were."""
    found = []
    for name, (shows, meaning) in _SIGNS.items():
        if shown := [int(step["step"]) for step in steps if shows(step)]:
            found.append(TrainingWarning(name=name, step=shown[0], message=f"{meaning} ({len(shown)} of {len(steps)} steps)"))
    return tuple(found)


def always(name: str, steps: list[Step]) -> bool:
    """Say whether every one of `steps` shows a sign, and there is at least one."""
    return bool(steps) and all(_SIGNS[name][0](step) for step in steps)
