"""Run one training attempt on several processes of this machine (ranks), and end all of them when one fails.

Launch: ``python -m tasks.programs.ranks ATTEMPT_DIR``. Starts `training.num_processes` times ``tasks.programs.train``, in its own
process group. Each writes ``ranks/<k>/outcome.json``, from which ``outcome.json`` is made; rank 0 writes all else. Needs no torch.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tasks.attempt_files import last_phase, unfinished_outcome
from tasks.files import read_record, write_record
from tasks.host_memory import usable_cpus
from tasks.params import Params
from tasks.places import PROJECT_DIR
from tasks.processes import PARENT_VARIABLE, log_tail
from tasks.programs import lifecycle
from tasks.rank_outcomes import RankReport, first_cause, merged_outcome, rank_dir, ranks_dir
from tasks.records import Outcome, TrainingJob

POLL_SECONDS = 0.1
# after one rank's failure the others may still say what they saw; then they get SIGTERM, and SIGKILL, which alone ends a rank that
# waits in a collective. The second is less than what this program is given when it is stopped itself
COMPLAINT_SECONDS, STOP_SECONDS = 5.0, 4.0


@dataclass
class Rank:
    """One process."""

    number: int
    folder: Path
    log_path: Path
    process: subprocess.Popen[bytes]
    outcome: Outcome | None = None
    seen_seconds: float | None = None

    def look(self, now: float | None) -> None:
        """Take its outcome, if it has written one; `now` is when that or its end was seen, None after it was told to end."""
        ended = self.process.poll() is not None
        path = self.folder / "outcome.json"
        if self.outcome is None and path.is_file():
            self.outcome = read_record(path, Outcome)
        if self.seen_seconds is None and (ended or self.outcome):
            self.seen_seconds = now

    @property
    def failed(self) -> bool:
        """Return whether it ended, or said that it does, without success."""
        return self.outcome.status != "succeeded" if self.outcome else self.seen_seconds is not None

    def report(self) -> RankReport:
        """Return what it left; it must have ended."""
        return RankReport(
            rank=self.number,
            outcome=self.outcome,
            returncode=self.process.wait(),
            seen_seconds=self.seen_seconds,
            log_tail=log_tail(self.log_path),
            phase=last_phase(self.folder),
        )


@dataclass
class Ranks:
    """All processes of an attempt."""

    job: TrainingJob
    num_processes: int
    ranks: list[Rank] = field(default_factory=list)

    def start(self) -> None:
        """Start every rank with its share of the CPUs and a device of its own; what an earlier try left is removed."""
        (self.job.attempt_dir / "outcome.json").unlink(missing_ok=True)
        shutil.rmtree(ranks_dir(self.job.attempt_dir), ignore_errors=True)
        cpus = usable_cpus(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, [])
        # set to nothing it hides every device, from each rank too
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.num_processes)))).split(",")
        # all are on this machine; a person's own settings win
        shared = {"OMP_NUM_THREADS": str(max(1, cpus // self.num_processes))}
        shared |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        for rank in range(self.num_processes):
            own = {"RANK": rank, "LOCAL_RANK": rank, PARENT_VARIABLE: os.getpid()}
            own |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), self.num_processes)
            environment = {**shared, **os.environ, **{name: str(value) for name, value in own.items()}}
            self._start(rank, {**environment, "CUDA_VISIBLE_DEVICES": devices[rank % len(devices)]})

    def _start(self, rank: int, environment: dict[str, str]) -> None:
        folder = rank_dir(self.job.attempt_dir, rank)
        folder.mkdir(parents=True)
        log_path = (folder if rank else self.job.attempt_dir) / "train.log"
        command = [sys.executable, "-m", "tasks.programs.train", str(self.job.attempt_dir)]
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                command, cwd=PROJECT_DIR, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        self.ranks.append(Rank(rank, folder, log_path, process))

    def wait(self) -> None:
        """Wait until all have ended, or until the others had `COMPLAINT_SECONDS` to end after one that failed, or after all are done."""

        def settled() -> bool:
            return any(rank.failed for rank in self.ranks) or all(rank.outcome for rank in self.ranks)

        self._wait(math.inf, settled)
        self._wait(COMPLAINT_SECONDS)

    def end(self) -> None:
        """End whatever still runs, within `STOP_SECONDS`; what is said from here on was said to the end's signal."""
        for send in (subprocess.Popen.terminate, subprocess.Popen.kill):
            for rank in self.ranks:
                if rank.process.poll() is None:
                    send(rank.process)
            self._wait(STOP_SECONDS, noted=False)

    def _wait(self, seconds: float, until: Callable[[], bool] = lambda: False, *, noted: bool = True) -> None:
        deadline = time.monotonic() + seconds
        while True:
            now, running = time.monotonic(), any(rank.process.poll() is None for rank in self.ranks)
            for rank in self.ranks:
                rank.look(now if noted else None)
            if not running or now > deadline or until():
                return
            time.sleep(POLL_SECONDS)


def main() -> int:
    """Run the attempt whose folder is the only argument; the result is outcome.json."""
    lifecycle.start()
    stopped = False
    try:
        job = read_record(Path(sys.argv[1]) / "attempt.json", TrainingJob)
        ranks = Ranks(job, Params.model_validate(job.params).training.num_processes)
    except lifecycle.StopRequested:
        return 128 + signal.SIGTERM
    try:
        ranks.start()
        ranks.wait()
    except lifecycle.StopRequested:
        stopped = True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ranks.end()
    return conclude(job, [rank.report() for rank in ranks.ranks], stopped)


def conclude(job: TrainingJob, reports: list[RankReport], stopped: bool) -> int:
    """Write the outcome of all, show the end of the log of a failed rank whose log is not this one's; return the exit code."""
    unfinished = unfinished_outcome(job)
    outcome = merged_outcome(reports, unfinished, stopped=stopped) if reports else unfinished
    cause = first_cause(reports)
    if cause and cause.rank and outcome.failure:
        print(f"the log of rank {cause.rank} ends so:\n{cause.log_tail}", flush=True)
    write_record(job.attempt_dir / "outcome.json", outcome)
    if stopped and outcome.status == "cancelled":
        return 128 + signal.SIGTERM
    if cause and cause.outcome is None and cause.returncode:
        return cause.returncode if cause.returncode > 0 else 128 - cause.returncode
    return 0 if outcome.status == "succeeded" else 1


if __name__ == "__main__":
    raise SystemExit(main())
