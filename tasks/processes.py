"""Run a child program: its own process group, its log in a file, stopped and reaped whatever happens.

A child is started as ``python -m <module>`` from an argv list. Its result is the file it writes, never its exit code.
"""

import contextlib
import ctypes
import math
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

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "HALFSTEP_PARENT_PID"
GRACE_SECONDS = 10.0
TAIL_BYTES = 4000


@dataclass(frozen=True)
class ProgramExit:
    """How a child process ended. `returncode` is negative for a signal, as in `subprocess`.

    `peak_rss_bytes` is the largest resident set of this child, of any that it waited for, or of its parent when it was started.
    """

    returncode: int
    timed_out: bool
    log_tail: str
    peak_rss_bytes: int


class _Child(subprocess.Popen[bytes]):
    peak_rss_bytes = 0

    def wait_for(self, seconds: float) -> None:
        """Wait for the end, so long at most: `subprocess` does not tell what the child took."""
        deadline = time.monotonic() + seconds
        while self.returncode is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.returncode, self.peak_rss_bytes = os.waitstatus_to_exitcode(status), peak_rss_bytes(usage)
            elif time.monotonic() >= deadline:
                return
            else:
                time.sleep(min(0.02, max(0.0, deadline - time.monotonic())))


def run_program(
    module: str,
    arguments: tuple[str, ...],
    log_path: Path,
    *,
    environment: Mapping[str, str] | None = None,
    on_tick: Callable[[], None] = lambda: None,
    tick_seconds: float = 0.5,
    timeout_seconds: float = math.inf,
) -> ProgramExit:
    """Run ``python -m module *arguments`` to its end; both output streams go to `log_path`.

    `on_tick` is called about every `tick_seconds` while the child runs and once after it ended. If anything is raised
    here (Ctrl-C, a cancel), the child's whole group gets SIGTERM, then SIGKILL after `GRACE_SECONDS`.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_seconds
    with log_path.open("ab") as log:
        child = _Child(
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
        while child.returncode is None and not timed_out:
            child.wait_for(tick_seconds)
            on_tick()
            timed_out = child.returncode is None and time.monotonic() > deadline
    finally:
        _stop_group(child)
    on_tick()
    return ProgramExit(child.returncode, timed_out, log_tail(log_path), child.peak_rss_bytes)


def _stop_group(child: _Child) -> None:
    # children that outlived their parent included
    try:
        if child.returncode is None:
            _signal_group(child.pid, signal.SIGTERM)
            child.wait_for(GRACE_SECONDS)
    finally:
        # a second Ctrl-C in the time of grace must not leave the group behind
        _signal_group(child.pid, signal.SIGKILL)
        child.wait_for(math.inf)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def peak_rss_bytes(usage: resource.struct_rusage) -> int:
    """Return the largest resident set that a usage tells of."""
    peak = usage.ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run_in_own_session() -> None:
    """Go on in a child process of its own session; this one waits for it, passes signals on and exits as it does.

    A terminal sends Ctrl-C to every process of its group. Prefect's temporary server must outlive it, or the flow could
    not say that it was stopped; so only the flow itself is told.
    """
    flow = os.fork()
    if flow == 0:
        os.setsid()
        # what a shell starts behind an & is born with SIGINT ignored
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        die_with_parent(signal.SIGINT)
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup means it
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: os.kill(flow, signal.SIGINT))
    _, status = os.waitpid(flow, 0)
    _signal_group(flow, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if code >= 0 else 128 - code)


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send `number` to this process when its parent dies (Linux; elsewhere nothing is done)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def log_tail(log_path: Path) -> str:
    """Return the last 4000 bytes of a log."""
    with log_path.open("rb") as stream:
        stream.seek(-min(TAIL_BYTES, log_path.stat().st_size), os.SEEK_END)
        return stream.read().decode("utf-8", errors="replace").strip()
