"""Ask a child program for a piece of work other than training: request.json in, result.json out, progress said."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from tasks.errors import HalfstepError, ProgramFailed, RefusedInput
from tasks.files import read_record, write_record
from tasks.params import DatasetParams, RewardParams
from tasks.processes import run_program
from tasks.records import Precision, Record

REQUEST_FILE = "request.json"
RESULT_FILE = "result.json"
ANSWERS_FILE = "answers.json"
PROGRESS_PREFIX = "progress: "


class ProgramResult(Record):
    """How a program that was given a request ended, written beside the request."""

    message: str = Field(default="", description="empty when the work was done")
    refused: bool = Field(default=False, description="the request cannot be done as asked; otherwise something failed")


class EvaluationRequest(Record):
    """One model's answers to every held-out problem are wanted."""

    model_dir: Path
    dataset_dir: Path
    dataset: DatasetParams
    reward: RewardParams
    precision: Precision
    batch_size: int = Field(ge=1, description="problems answered at once")
    max_new_tokens: int = Field(ge=1)


class ScoredAnswer(Record):
    """A greedy completion of one problem."""

    question: str
    expected: str
    completion: str
    score: float
    num_tokens: int = Field(description="up to and with the end token")
    ended: bool = Field(description="the model ended it; otherwise it was cut at max_new_tokens")


class ModelAnswers(Record):
    """All answers of one model, in the order of eval.parquet."""

    answers: tuple[ScoredAnswer, ...] = Field(min_length=1)
    weights_dtype: str = Field(description="of the copy that generated")
    observed_dtypes: tuple[str, ...] = Field(description="outputs of linear layers, as seen")
    num_tokens: int = Field(description="prompt and completion tokens, padding excluded")


def ask_program(module: str, request: Record, work_dir: Path, say: Callable[[str], None]) -> None:
    """Run a program on a request; its progress lines go to `say` as they come.

    Raises:
        RefusedInput: the program says that the request cannot be done.
        HalfstepError: the program says what failed.
        ProgramFailed: the program ended without saying anything; carries the log's tail.
    """
    result_path, log_path = work_dir / RESULT_FILE, work_dir / "program.log"
    result_path.unlink(missing_ok=True)
    log_path.unlink(missing_ok=True)
    write_record(work_dir / REQUEST_FILE, request)
    ended = run_program(module, (str((work_dir / REQUEST_FILE).resolve()),), log_path, on_tick=_ProgressEcho(log_path, say))
    if not result_path.is_file():
        how = f"ended with code {ended.returncode} and without a result"
        raise ProgramFailed(f"python -m {module} {how}; its log {log_path} ends so:\n{ended.log_tail}")
    result = read_record(result_path, ProgramResult)
    if result.refused:
        raise RefusedInput(result.message)
    if result.message:
        raise HalfstepError(f"{result.message}\nThe log is {log_path}")


@dataclass
class _ProgressEcho:
    """Tells a growing log's progress lines, each once."""

    log_path: Path
    say: Callable[[str], None]
    num_bytes: int = 0

    def __call__(self) -> None:
        with self.log_path.open("rb") as stream:
            stream.seek(self.num_bytes)
            whole = stream.read().rpartition(b"\n")[0]
        self.num_bytes += len(whole) + 1 if whole else 0
        for line in whole.decode("utf-8", errors="replace").splitlines():
            if line.startswith(PROGRESS_PREFIX):
                self.say(line.removeprefix(PROGRESS_PREFIX))
