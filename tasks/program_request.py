"""Ask a child program for a piece of work other than training: request.json in, result.json out, progress said."""

import math
from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from tasks.errors import HalfstepError, ProgramFailed, RefusedInput
from tasks.files import GrowingFile, read_record, write_record
from tasks.params import Params
from tasks.processes import run_program
from tasks.records import Precision, Record

REQUEST_FILE = "request.json"
RESULT_FILE = "result.json"
PROGRESS_PREFIX = "progress: "


class ProgramResult(Record):
    """How a program that was given a request ended, written beside the request."""

    message: str = Field(default="", description="empty when the work was done")
    refused: bool = Field(default=False, description="the request cannot be done as asked; otherwise something failed")


class EvaluationRequest(Record):
    """One model's answers to every held-out problem are wanted."""

    model_dir: Path
    dataset_dir: Path
    out_file: Path
    precision: Precision
    params: Params


class EvaluationBatch(Record):
    """Several of these, answered one after the other in one process."""

    requests: tuple[EvaluationRequest, ...] = Field(min_length=1)


class ScoredAnswer(Record):
    """A completion of one problem."""

    question: str
    expected: str
    completion: str
    score: float


class ModelAnswers(Record):
    """All answers of one model, in the order of eval.parquet."""

    answers: tuple[ScoredAnswer, ...] = Field(min_length=1)
    decode_time_ms: float | None = Field(
        default=None, description="of a batch's answers over the tokens of its longest, prompts included; median, the first batch left out"
    )


def ask_program(module: str, request: Record, work_dir: Path, say: Callable[[str], None], timeout_seconds: float = math.inf) -> None:
    """Run a program on a request; its progress lines go to `say` as they come.

    Raises:
        RefusedInput: the program says that the request cannot be done.
        HalfstepError: the program says what failed.
        ProgramFailed: the program ended, or was stopped after `timeout_seconds`, without saying anything; carries the log's tail.
    """
    result_path, log_path = work_dir / RESULT_FILE, work_dir / "program.log"
    result_path.unlink(missing_ok=True)
    log_path.unlink(missing_ok=True)
    write_record(work_dir / REQUEST_FILE, request)
    log = GrowingFile(log_path)

    def tell_progress() -> None:
        for line in log.new_lines():
            if line.startswith(PROGRESS_PREFIX):
                say(line.removeprefix(PROGRESS_PREFIX))

    argument = str((work_dir / REQUEST_FILE).resolve())
    ended = run_program(module, (argument,), log_path, on_tick=tell_progress, timeout_seconds=timeout_seconds)
    if not result_path.is_file():
        how = f"was stopped after {timeout_seconds:g} s" if ended.timed_out else f"ended with code {ended.returncode}"
        raise ProgramFailed(f"python -m {module} {how} and without a result; its log {log_path} ends so:\n{ended.log_tail}")
    result = read_record(result_path, ProgramResult)
    if result.refused:
        raise RefusedInput(result.message)
    if result.message:
        raise HalfstepError(f"{result.message}\nThe log is {log_path}")
