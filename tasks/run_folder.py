"""The folder of one run: opened, opened again for a resume, and what is found in it."""

import contextlib
import json
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import yaml
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from tasks.attempt_files import unfinished_outcome
from tasks.errors import RefusedInput
from tasks.files import file_lock, read_record, write_aside, write_record
from tasks.params import Params, differences, load_params
from tasks.places import PROJECT_DIR, RUNS_DIR, as_found
from tasks.records import FinishedAttempt, Outcome, RunFolder, SourceVersion, TrainingJob

PARAMS_FILE = "params.yaml"
# the record of a comparison, written at its end
COMPARISON_FILE = "comparison.json"
_HELD: list[RunFolder] = []
_LOCKS = contextlib.ExitStack()


@task(cache_policy=NO_CACHE)
def open_run(params: Params, resume: str | None) -> RunFolder:
    """Create the run's folder with its resolved params, or open the one that is to go on."""
    now = datetime.now(UTC)
    flow_run_id = str(flow_run.id) if flow_run.id else None
    if resume is not None:
        folder = find_run(resume, flow_run.flow_name).model_copy(update={"flow_run_id": flow_run_id})
        hold(folder)
        get_run_logger().info("going on with run %s", folder.name)
        changed = differences(load_params(folder.run_dir / PARAMS_FILE), params)
        if changes := [f"{path} {old} -> {new}" for path, (old, new) in changed.items()]:
            folder = folder.model_copy(update={"changes": (*folder.changes, ", ".join(changes))})
            _write(folder, params)
            get_run_logger().info("set on this resume: %s", folder.changes[-1])
        return folder
    # the name is a folder's and an entry's of the store, and people may call a flow run anything
    name = f"{now:%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9]+', '-', flow_run.name or 'run').strip('-')}"
    folder = RunFolder(
        name=name,
        run_dir=RUNS_DIR / name,
        started_at=now.isoformat(timespec="seconds"),
        flow_run_id=flow_run_id,
        flow=flow_run.flow_name,
        source=source_version(),
    )
    folder.run_dir.mkdir(parents=True)
    hold(folder)
    _write(folder, params)
    get_run_logger().info("run %s in %s", name, as_found(folder.run_dir))
    return folder


def _write(folder: RunFolder, params: Params) -> None:
    write_aside(folder.run_dir / PARAMS_FILE, yaml.safe_dump(params.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
    write_record(folder.run_dir / "run_folder.json", folder)


def hold(folder: RunFolder) -> None:
    """Lock a run's folder for this process, until it ends.

    Raises:
        RefusedInput: another process is at work on the run.
    """

    def refuse() -> None:
        raise RefusedInput(f"run {folder.name} is still running in another process; wait for its end, or stop it first")

    _LOCKS.enter_context(file_lock(folder.run_dir / ".lock", refuse))
    _HELD.append(folder)


def held_run() -> RunFolder | None:
    """Return the run this process is at work on."""
    return _HELD[-1] if _HELD else None


def find_run(name: str, flow: str) -> RunFolder:
    """Return the folder of an earlier run of a flow by its name.

    Raises:
        RefusedInput: there is no such run, it is another flow's, or it has already come to its end.
    """
    run_dir = RUNS_DIR / Path(name).name
    if not (run_dir / "run_folder.json").is_file():
        known = sorted(path.parent.name for path in RUNS_DIR.glob("*/run_folder.json"))[-5:]
        raise RefusedInput(f"--resume {name}: there is no such run in {as_found(RUNS_DIR)}/; the newest are {', '.join(known) or 'none'}")
    folder = read_record(run_dir / "run_folder.json", RunFolder)
    if folder.flow != flow:
        raise RefusedInput(f"--resume {name}: a run of another flow; go on with python -m flows.{folder.flow} --resume {name}")
    ended = run_dir / "run.json"
    if (run_dir / COMPARISON_FILE).is_file():
        raise RefusedInput(f"--resume {name}: that comparison has come to its end; see {as_found(run_dir)}/summary.txt, or start a new one")
    # of any version's form
    if ended.is_file() and json.loads(ended.read_text(encoding="utf-8"))["status"] == "succeeded":
        raise RefusedInput(f"--resume {name}: that run succeeded; see {as_found(run_dir)}/summary.txt, or start a new one")
    return folder


def earlier_attempts(folder: RunFolder) -> tuple[FinishedAttempt, ...]:
    """Return the attempts a run has made so far, oldest first; one that left no outcome counts as cancelled."""
    paths = sorted(folder.run_dir.glob("*/attempt.json"), key=lambda path: path.stat().st_mtime_ns)
    return tuple(
        FinishedAttempt(attempt=job.attempt, outcome=interrupted_outcome(job), attempt_dir=job.attempt_dir, in_earlier_start=True)
        for job in (read_record(path, TrainingJob) for path in paths)
    )


def interrupted_outcome(job: TrainingJob) -> Outcome:
    """Return the outcome an attempt left, or one that says it was interrupted before it could leave any."""
    path = job.attempt_dir / "outcome.json"
    return read_record(path, Outcome) if path.is_file() else unfinished_outcome(job)


def source_version() -> SourceVersion:
    """Return the git commit the code is at and whether the tree differs from it; None outside a checkout."""
    command = ["git", "status", "--porcelain=v2", "--branch"]
    try:
        status = subprocess.run(command, cwd=PROJECT_DIR, capture_output=True, text=True, check=True, timeout=30).stdout
    except (FileNotFoundError, subprocess.SubprocessError):
        return SourceVersion(git_commit=None, dirty=None)
    commit = re.search(r"^# branch\.oid ([0-9a-f]{40,})$", status, re.MULTILINE)
    return SourceVersion(git_commit=commit and commit[1], dirty=any(not line.startswith("#") for line in status.splitlines()))
