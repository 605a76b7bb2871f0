"""The steps of a run as one curve over its attempts, and a picture of it."""

from pathlib import Path

from matplotlib.figure import Figure

from tasks.attempt_files import read_steps
from tasks.records import FinishedAttempt

PANELS = (
    ("reward", "mean reward"),
    ("grad_norm", "gradient norm, before clipping"),
    ("step_time_ms", "ms a step"),
    ("peak_memory_mb", "peak memory, MB"),
)


def joined_steps(finished: tuple[FinishedAttempt, ...]) -> list[dict[str, float]]:
    """Return the metrics of each step that counts, oldest first.

    An attempt replaces what earlier ones did after the training state that it went on from.
    """
    steps: dict[int, dict[str, float]] = {}
    for done in finished:
        own = {int(step["step"]): step for step in read_steps(done.attempt_dir)}
        if own:
            steps = {number: step for number, step in steps.items() if number < min(own)} | own
    return [steps[number] for number in sorted(steps)]


def draw_curves(finished: tuple[FinishedAttempt, ...], title: str, path: Path) -> Path:
    """Draw reward, gradient norm, step time and peak memory of every attempt to a PNG."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True).flatten()
    for done in finished:
        steps = read_steps(done.attempt_dir)
        for axis, (name, _) in zip(axes, PANELS, strict=True):
            rows = [step for step in steps if name in step]
            axis.plot([row["step"] for row in rows], [row[name] for row in rows], marker=".", label=done.attempt.name)
    for axis, (_, label) in zip(axes, PANELS, strict=True):
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    for axis in axes[2:]:
        axis.set_xlabel("optimizer step")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    return path
