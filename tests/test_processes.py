"""A child ends with all it started, whatever happens to its parent."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tasks.memory import MB
from tasks.places import PROJECT_DIR
from tasks.processes import peak_rss_bytes, run_program

SLEEPER = """
import subprocess, sys, time
from tasks.programs import lifecycle
lifecycle.start()
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(f"{grandchild.pid}")
try:
    time.sleep(600)
except lifecycle.StopRequested:
    open(sys.argv[1] + ".stopped", "w").write("yes")
    lifecycle.end_group()
"""
PARENT = """
import sys
from pathlib import Path
from tasks.processes import run_program
run_program("sleeper", (sys.argv[1],), Path(sys.argv[1] + ".log"))
"""


@pytest.fixture
def module_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    (tmp_path / "parent.py").write_text(PARENT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{PROJECT_DIR}")
    return tmp_path


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not (path.is_file() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)
    return path.read_text()


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_an_exception_here_stops_the_whole_group(module_path: Path) -> None:
    marker = module_path / "pid"

    def stop_when_running() -> None:
        if marker.is_file() and marker.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_program("sleeper", (str(marker),), module_path / "log", on_tick=stop_when_running, tick_seconds=0.05)
    assert (module_path / "pid.stopped").read_text() == "yes"
    assert gone(int(marker.read_text()))


def test_a_killed_parent_takes_child_and_grandchild_along(module_path: Path) -> None:
    marker = module_path / "pid"
    parent = subprocess.Popen([sys.executable, "-m", "parent", str(marker)], cwd=PROJECT_DIR)
    grandchild = int(wait_for(marker))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(grandchild)


def test_time_out_and_exit_code_are_told_apart(module_path: Path) -> None:
    (module_path / "leaver.py").write_text("import sys; print('last words'); sys.exit(7)\n")
    ended = run_program("leaver", (), module_path / "leaver.log")
    assert (ended.returncode, ended.timed_out, ended.log_tail) == (7, False, "last words")
    late = run_program("sleeper", (str(module_path / "pid"),), module_path / "late.log", timeout_seconds=3, tick_seconds=0.1)
    assert late.timed_out
    assert late.returncode < 0


def test_a_child_is_told_apart_from_those_before_it_by_what_it_took(module_path: Path) -> None:
    (module_path / "taker.py").write_text("import sys; held = b'x' * int(sys.argv[1])\n")
    own = peak_rss_bytes(resource.getrusage(resource.RUSAGE_SELF))
    large, small = (run_program("taker", (str(size),), module_path / "log").peak_rss_bytes for size in (own + 100 * MB, 1))
    assert small < large - 50 * MB and large > own + 100 * MB


def test_what_a_child_left_running_is_ended(module_path: Path) -> None:
    (module_path / "forgetful.py").write_text(
        textwrap.dedent("""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(sys.argv[1], "w").write(str(child.pid))
        """)
    )
    run_program("forgetful", (str(module_path / "left"),), module_path / "log")
    assert gone(int((module_path / "left").read_text()))


def test_a_flow_behind_an_ampersand_outlives_its_terminal_and_can_be_stopped(module_path: Path) -> None:
    """A shell's background jobs are born with SIGINT ignored, and nohup's with SIGHUP."""
    (module_path / "sessioned.py").write_text(
        textwrap.dedent("""
        import os, sys, time
        from tasks.processes import run_in_own_session
        run_in_own_session()
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
        """)
    )
    marker = module_path / "flow"
    command = ["bash", "-c", 'trap "" INT HUP; exec "$0" -m sessioned "$1"', sys.executable, str(marker)]
    parent = subprocess.Popen(command, cwd=PROJECT_DIR, stderr=subprocess.DEVNULL)
    flow = int(wait_for(marker))
    parent.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        parent.wait(1)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(30) == 128 + signal.SIGINT
    assert gone(flow)
