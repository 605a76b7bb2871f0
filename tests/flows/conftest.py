"""One Prefect server for the whole session, and whole-flow runs that several tests look at."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow_runs import SMOKE_BUDGET_MB, FlowRun, run_flow


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server on loopback; its URL."""
    home = tmp_path_factory.mktemp("prefect")
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    with (home / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_healthy(f"{url}/health", server, home / "server.log")
        yield url
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture(scope="session")
def flow_environment(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a flow: the session's server, and runs and state of its own."""
    home = tmp_path_factory.mktemp("home")
    # with all threads, as people run it: how many there are is felt in memory
    apart = ("MLFLOW_", "PREFECT_", "DVC_", "OMP_NUM_THREADS")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(apart)}
    prefect_home = tmp_path_factory.mktemp("prefect-client")
    return {**kept, "PREFECT_API_URL": prefect_server, "PREFECT_HOME": str(prefect_home), "HALFSTEP_HOME": str(home)}


@pytest.fixture(scope="session")
def smoke_run(flow_environment: dict[str, str]) -> FlowRun:
    """params/smoke.yaml with nothing that could run short: one bf16 attempt."""
    return run_flow(flow_environment, "--params", "params/smoke.yaml", "precision.mode=bf16")


@pytest.fixture(scope="session")
def retry_run(flow_environment: dict[str, str]) -> FlowRun:
    """The same under a budget that the baseline exceeds."""
    return run_flow(flow_environment, "--params", "params/smoke.yaml", "precision.mode=bf16", f"memory.budget_mb={SMOKE_BUDGET_MB}")


def free_port() -> int:
    """Return a port that is free on loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path, seconds: float = 180) -> None:
    """Wait until `url` answers; fail with the server's log if it ends or never does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"the server did not come up:\n{log.read_text()[-3000:]}")
