"""Where runs and state lie: in the checkout, or under HALFSTEP_HOME, such as on a larger disk."""

import os
from pathlib import Path

PROJECT_DIR = Path(__file__).resolve().parents[1]
HOME_DIR = Path(os.environ.get("HALFSTEP_HOME") or PROJECT_DIR).resolve()
RUNS_DIR = HOME_DIR / "runs"
STATE_DIR = HOME_DIR / "state"
STORE_DIR = STATE_DIR / "store"


def as_found(path: Path) -> str:
    """Return a path as a person finds it: from the working directory if it lies below it, otherwise from the root."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
