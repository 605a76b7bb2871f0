"""What every child program does first: die with its parent, take its children along, and end on SIGTERM."""

import os
import signal
from types import FrameType

from tasks.processes import PARENT_VARIABLE, die_with_parent


class StopRequested(BaseException):
    """SIGTERM arrived: the parent wants an end, or is gone."""


def start() -> None:
    """Tie this process to its parent: when the parent dies, SIGTERM comes, raised here as `StopRequested`."""
    signal.signal(signal.SIGTERM, _raise_stop)
    die_with_parent(signal.SIGTERM)
    expected = os.environ.get(PARENT_VARIABLE)
    if expected is not None and os.getppid() != int(expected):
        raise SystemExit("the parent process is gone")


def end_group() -> None:
    """Kill every process of this program's group, itself included, if it leads one (called after a stop)."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)


def _raise_stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise StopRequested
