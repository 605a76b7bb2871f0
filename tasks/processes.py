"""Run a child program: its own process group, its log in a file, stopped and reaped whatever happens.

A child is started as ``python -m <module>`` from an argv list. Its result is the file it writes, never its exit code.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.places import PROJECT_DIR

PARENT_VARIABLE = "HALFSTEP_PARENT_PID"


@dataclass(frozen=True)
class ProgramExit:
    """How a child process ended. `returncode` is negative for a signal, as in `subprocess`.

    `peak_rss_bytes` is the largest resident set of any child waited for so far: an upper bound for this one.
    """

    returncode: int
    timed_out: bool
    seconds: float
    log_tail: str
    peak_rss_bytes: int


def run_program(
    module: str,
    arguments: tuple[str, ...],
    log_path: Path,
    *,
    environment: Mapping[str, str] | None = None,
    on_tick: Callable[[], None] | None = None,
    tick_seconds: float = 0.5,
    timeout_seconds: float | None = None,
    grace_seconds: float = 10.0,
) -> ProgramExit:
    """Run ``python -m module *arguments`` to its end; both output streams go to `log_path`.

    `on_tick` is called about every `tick_seconds` while the child runs and once after it ended. If anything is raised
    here (Ctrl-C, a cancel), the child's whole group gets SIGTERM, then SIGKILL after `grace_seconds`.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log_path.open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=PROJECT_DIR,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {}), PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )
    timed_out = False
    try:
        while not _ended(child, tick_seconds):
            if on_tick:
                on_tick()
            if timeout_seconds is not None and time.monotonic() - started > timeout_seconds:
                timed_out = True
                break
    finally:
        stop_group(child, grace_seconds)
    if on_tick:
        on_tick()
    return ProgramExit(child.returncode, timed_out, time.monotonic() - started, read_tail(log_path), _peak_child_rss_bytes())


def _ended(child: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def stop_group(child: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """End the child's process group, children that outlived their parent included, and reap the child."""
    if child.poll() is None:
        _signal_group(child.pid, signal.SIGTERM)
        _ended(child, grace_seconds)
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _peak_child_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def read_tail(path: Path, num_bytes: int = 4000) -> str:
    """Return the end of a log, at most `num_bytes`."""
    with path.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - num_bytes))
        return stream.read().decode("utf-8", errors="replace").strip()
