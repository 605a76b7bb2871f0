"""What an attempt's folder says about it while it runs and after it died: metrics, training states."""

import json
import logging
from pathlib import Path
from typing import cast

from tasks.files import GrowingFile
from tasks.params import Params
from tasks.records import Failure, Outcome, Phase, TrainingJob

STATE_PREFIX = "checkpoint-"
PHASE_FILE = "phase"
METRICS_FILE = "metrics.jsonl"


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
    return new_steps(GrowingFile(attempt_dir / METRICS_FILE))


def new_steps(file: GrowingFile) -> list[dict[str, float]]:
    """Return what `read_steps` does of the lines that were finished since the last call; one that is damaged is warned of and left out."""
    steps = []
    for line in file.new_lines():
        try:
            entry = json.loads(line)
            steps.append({"step": float(entry["step"]), "time": float(entry["time"]), **entry["metrics"]})
        except (ValueError, KeyError, TypeError):
            logging.getLogger(__name__).warning("%s: a line that is no step is left out: %.80r", file.path, line)
    return steps


def last_phase(folder: Path) -> Phase | None:
    """Return the phase in which the training process of a folder, or one rank of it, was last; None if it came to none."""
    file = folder / PHASE_FILE
    return cast("Phase", file.read_text().strip()) or None if file.is_file() else None


def unfinished_outcome(job: TrainingJob) -> Outcome:
    """Return the outcome of an attempt whose process ended and left none, from what else it wrote."""
    message = "the attempt was interrupted and left no outcome"
    steps, first_step = read_steps(job.attempt_dir), state_step(job.attempt.resume_from)
    return Outcome(
        status="cancelled",
        first_step=first_step,
        steps_done=int(steps[-1]["step"]) if steps else first_step,
        total_steps=Params.model_validate(job.params).training.max_steps,
        last_state_dir=last_training_state(job.attempt_dir) or job.attempt.resume_from,
        failure=Failure(phase=last_phase(job.attempt_dir), error_type="ProcessDied", message=message),
    )
