"""What an attempt's folder says about it while it runs and after it died: metrics, training states."""

import json
from pathlib import Path

STATE_PREFIX = "checkpoint-"


def training_states(states_dir: Path) -> list[Path]:
    """Return the whole training states of a folder, oldest first."""
    return sorted(states_dir.glob(f"{STATE_PREFIX}*"), key=state_step)


def state_step(state_dir: Path | None) -> int:
    """Return the optimizer step at which a training state was saved; 0 where there is none to go on from."""
    return int(state_dir.name.removeprefix(STATE_PREFIX)) if state_dir else 0


def last_training_state(attempt_dir: Path) -> Path | None:
    """Return an attempt's newest training state, if it saved any."""
    return next(reversed(training_states(attempt_dir / "states")), None)


def read_steps(attempt_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of each step an attempt wrote, with its 'step' and unix 'time'; a torn last line is left out."""
    path = attempt_dir / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    return [{"step": float(entry["step"]), "time": float(entry["time"]), **entry["metrics"]} for entry in map(json.loads, lines)]
