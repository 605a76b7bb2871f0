"""Metrics on their way to MLflow: each point once, whatever becomes of the server."""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from tasks.attempt_log import AttemptLog
from tasks.records import PrecisionPlan, TrackedRun


def append(path: Path, steps: range, **metrics: float) -> None:
    with path.open("a") as stream:
        for step in steps:
            values = metrics or {"reward": step / 7, "loss": -step}
            stream.write(json.dumps({"step": step, "time": 1.7e9 + step / 3, "metrics": values}) + "\n")


def log_of(parent: TrackedRun, plan: PrecisionPlan, folder: Path, warn: Callable[[str], None] = print, **more: float) -> AttemptLog:
    return AttemptLog(parent, plan.attempts[0], folder, warn, **more)


def finish(log: AttemptLog, patience_seconds: float = 60.0) -> str:
    assert log.run is not None
    return log.finish(log.run, patience_seconds)


def reach_through(log: AttemptLog, uri: str) -> None:
    assert log.run is not None
    log.run = log.run.model_copy(update={"tracking_uri": uri})


def points(parent: TrackedRun, log: AttemptLog, name: str) -> list[Metric]:
    assert log.run is not None
    return MlflowClient(parent.tracking_uri).get_metric_history(log.run.run_id, name)


def history(parent: TrackedRun, log: AttemptLog, name: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in points(parent, log, name))


def test_grows_with_the_file_and_keeps_half_lines_back(parent: TrackedRun, plan: PrecisionPlan, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = log_of(parent, plan, tmp_path)
    log.send()
    append(path, range(1, 1201))
    log.send()
    assert len(history(parent, log, "loss")) == 1200
    with path.open("a") as stream:
        stream.write('{"step": 1201, "time": 1700000000.5, ')
        stream.flush()
        log.send()
        assert len(history(parent, log, "reward")) == 1200
        stream.write('"metrics": {"reward": 0.5, "a=b": 2}}\n{"step": 1202')
    assert (finish(log, 0), log.pending) == ("", [])
    assert history(parent, log, "reward") == [*((step, step / 7) for step in range(1, 1201)), (1201, 0.5)]
    assert history(parent, log, "a_b") == [(1201, 2)]
    first = points(parent, log, "reward")[0]
    assert first.timestamp == round((1.7e9 + 1 / 3) * 1000)


def test_sending_a_file_again_doubles_nothing(parent: TrackedRun, plan: PrecisionPlan, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, range(600))
    log_of(parent, plan, tmp_path).send()
    append(path, range(600, 700))
    again = log_of(parent, plan, tmp_path)
    assert finish(again) == ""
    assert [step for step, _ in history(parent, again, "loss")] == list(range(700))


def test_values_that_are_not_finite_are_visible_and_do_not_reach_the_chart(parent: TrackedRun, plan: PrecisionPlan, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, range(1, 2), grad_norm=1.5)
    append(path, range(2, 3), grad_norm=float("inf"))
    append(path, range(3, 4), grad_norm=float("nan"))
    log = log_of(parent, plan, tmp_path)
    assert finish(log) == ""
    assert history(parent, log, "grad_norm") == [(1, 1.5)]
    assert history(parent, log, "grad_norm_nonfinite") == [(2, 1), (3, 1)]


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail("a minute passed in vain")


class Server:
    """A real tracking server on 127.0.0.1, on the database that the other tests use directly."""

    def __init__(self, database: str, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = ("--backend-store-uri", database, "--artifacts-destination", str(folder / "artifacts"), "--workers", "1")
        self._log = (folder / "server.log").open("ab")

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), *self._arguments],
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the server ended by itself"
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Gate(http.server.ThreadingHTTPServer):
    """Stands before a server and passes requests on; may lose the answers."""

    loses_answers = False

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), PassOn)
        self.target = target
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class PassOn(http.server.BaseHTTPRequestHandler):
    server: Gate

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = urllib.request.Request(self.server.target + self.path, body, {"Content-Type": "application/json"})
        try:
            answer = urllib.request.urlopen(request, timeout=30).read()
        except OSError:
            return
        if not self.server.loses_answers:
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)


def test_server_that_goes_away_and_comes_back_has_every_point_once(parent: TrackedRun, plan: PrecisionPlan, tmp_path: Path) -> None:
    server = Server(parent.tracking_uri, tmp_path)
    path = tmp_path / "metrics.jsonl"
    told: list[str] = []
    gate = Gate(server.url)
    log = log_of(parent, plan, tmp_path, told.append, retry_seconds=0)
    reach_through(log, gate.url)
    server.start()
    try:
        append(path, range(50))
        log.send()
        # the request is carried out, its answer is lost: nobody can tell it from one that never arrived
        gate.loses_answers = True
        append(path, range(50, 100))
        log.send()
        assert (len(history(parent, log, "reward")), len(log.pending)) == (100, 50)
        gate.loses_answers = False
        log.send()
        assert log.pending == []
        server.kill()
        append(path, range(100, 1300))
        log.send()
        message = finish(log, 0)
        assert len(log.pending) == 1200 and str(path) in message
        server.start()
        message = finish(log)
    finally:
        server.kill()
        gate.shutdown()
    assert (log.pending, message) == ([], "")
    assert [("is away" in text, "answers again" in text) for text in told] == [(True, False), (False, True)] * 2
    assert history(parent, log, "reward") == [(step, step / 7) for step in range(1300)]
    assert history(parent, log, "loss") == sorted((step, -step) for step in range(1300))


def test_after_a_failure_the_server_is_left_alone_for_a_while(parent: TrackedRun, plan: PrecisionPlan, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, range(3))
    told: list[str] = []
    log = log_of(parent, plan, tmp_path, told.append, retry_seconds=3600)
    reach_through(log, "http://127.0.0.1:9")
    for _ in range(200):
        log.send()
    assert len(told) == 1
