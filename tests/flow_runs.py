"""Run a flow as a person would, and read what it left."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run

from tasks.comparison_measures import ComparisonRecord
from tasks.files import read_record
from tasks.records import RunRecord
from tasks.run_folder import COMPARISON_FILE

ROOT = Path(__file__).resolve().parents[1]
# the README's budget for params/smoke.yaml: the baseline does not fit, the retry does
SMOKE_BUDGET_MB = 500
STEP_METRICS = {
    "loss",
    "reward",
    "grad_norm",
    "learning_rate",
    "step_time_ms",
    "rollout_time_ms",
    "forward_backward_time_ms",
    "tokens_per_second",
    "peak_memory_mb",
    "entropy",
    "completions/clipped_ratio",
    "completions/mean_length",
    "frac_reward_zero_std",
}


@dataclass(frozen=True)
class FlowRun:
    """A finished process of the flow."""

    returncode: int
    stdout: str
    stderr: str
    home: Path

    @property
    def run_dir(self) -> Path:
        """The run's folder, as the log names it."""
        match = re.search(r"run (\S+) in \S*runs/", self.stderr) or re.search(r"going on with run (\S+)", self.stderr)
        assert match, self.stderr[-3000:]
        return self.home / "runs" / match.group(1)

    @property
    def record(self) -> RunRecord:
        """The run's record."""
        return read_record(self.run_dir / "run.json", RunRecord)

    @property
    def comparison(self) -> ComparisonRecord:
        """The record of a comparison."""
        return read_record(self.run_dir / COMPARISON_FILE, ComparisonRecord)

    @property
    def client(self) -> MlflowClient:
        """A client of the run's MLflow store."""
        return MlflowClient(f"sqlite:///{self.home / 'state' / 'mlflow.db'}")

    def parent(self) -> Run:
        """The run's parent in MLflow."""
        return self.client.get_run(self.record.tracked.run_id)

    def children(self) -> list[Run]:
        """The run's attempts in MLflow, in order."""
        parent = self.parent()
        found = self.client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
        return sorted(found, key=lambda run: run.info.start_time)


def run_flow(environment: dict[str, str], *arguments: str, flow: str = "retrain", timeout: float = 1800) -> FlowRun:
    """Run ``python -m flows.<flow>`` to its end."""
    done = subprocess.run(
        [sys.executable, "-m", f"flows.{flow}", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return FlowRun(done.returncode, done.stdout, done.stderr, Path(environment["HALFSTEP_HOME"]))


def processes_naming(text: str) -> list[str]:
    """Return the command lines of living processes that contain `text`."""
    lines = subprocess.run(["ps", "-eo", "pid=,stat=,args="], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if text in line and " Z" not in line and "ps -eo" not in line]
