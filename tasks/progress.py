"""Say how far training is and when it will end, from the metrics file as it grows; draw what a run's attempts wrote."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from matplotlib.figure import Figure

from tasks.attempt_files import read_steps
from tasks.records import FinishedAttempt
from tasks.warning_signs import warning_signs

SHOWN_EVERY_SECONDS = 5.0
PANELS = (
    ("reward", "mean reward"),
    ("grad_norm", "gradient norm, before clipping"),
    ("step_time_ms", "ms a step"),
    ("peak_memory_mb", "peak memory, MB"),
)


@dataclass
class TrainingProgress:
    """Tells `say` one line when a step is done, at most one in a few seconds, always the last step, and each new warning once."""

    attempt_dir: Path
    shown_step: int
    total_steps: int
    say: Callable[[str], None]
    next_time: float = 0.0
    warned: set[str] = field(default_factory=set)

    def update(self, *, final: bool = False) -> None:
        """Look for new steps and tell about the newest; `final` waits for nothing."""
        if not final and time.monotonic() < self.next_time:
            return
        self.next_time = time.monotonic() + SHOWN_EVERY_SECONDS
        steps = read_steps(self.attempt_dir)
        for sign in warning_signs(steps):
            if sign.name not in self.warned:
                self.warned.add(sign.name)
                self.say(f"warning, step {sign.step}, {sign.name}: {sign.message}")
        if not steps or int(steps[-1]["step"]) == self.shown_step:
            return
        self.shown_step = int(steps[-1]["step"])
        self.say(progress_line(steps, self.total_steps, datetime.now().astimezone()))


def progress_line(steps: list[dict[str, float]], total_steps: int, now: datetime) -> str:
    """Return one line about the newest of `steps`, with the time left estimated from the last ten."""
    last = steps[-1]
    recent = [step["step_time_ms"] for step in steps[-10:]]
    left = timedelta(milliseconds=sum(recent) / len(recent) * (total_steps - last["step"]))
    parts = [f"step {last['step']:.0f}/{total_steps}"]
    parts += [f"reward {last['reward']:.3f}"] if "reward" in last else []
    parts += [f"loss scale {last['loss_scale']:g}"] if "loss_scale" in last else []
    parts += [f"{last['step_time_ms'] / 1000:.1f} s a step", f"peak {last['peak_memory_mb']:.0f} MB"]
    parts += [f"{duration(left)} left (until {now + left:%H:%M})"] if left else []
    return "  ".join(parts)


def duration(time_left: timedelta) -> str:
    """Return a duration as people say it: 40 s, 7 min, 2 h 05 min."""
    seconds = round(time_left.total_seconds())
    if seconds < 90:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


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


def lost_steps(finished: tuple[FinishedAttempt, ...]) -> list[dict[str, float]]:
    """Return the metrics of each step that does not count: a later attempt went on from a training state before it."""
    kept = {step["time"] for step in joined_steps(finished)}
    return [step for done in finished for step in read_steps(done.attempt_dir) if step["time"] not in kept]


def draw_curves(finished: tuple[FinishedAttempt, ...], title: str, path: Path) -> Path:
    """Draw reward, gradient norm, step time and peak memory of every attempt to a PNG."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True).flatten()
    for axis, (name, label) in zip(axes, PANELS, strict=True):
        for done in finished:
            rows = [step for step in read_steps(done.attempt_dir) if name in step]
            axis.plot([row["step"] for row in rows], [row[name] for row in rows], marker=".", label=done.attempt.name)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    for axis in axes[2:]:
        axis.set_xlabel("optimizer step")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    return path
