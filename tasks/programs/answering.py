"""How a program that builds something takes its request and says how it ended."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from tasks.errors import HalfstepError, RefusedInput
from tasks.files import read_record, write_record
from tasks.program_request import RESULT_FILE, ProgramResult
from tasks.programs import lifecycle
from tasks.records import Record

Request = TypeVar("Request", bound=Record)


def answer_request(path: Path, kind: type[Request], work: Callable[[Request], None]) -> int:
    """Read REQUEST.json, do the work and write ``result.json`` beside it; return the exit code."""
    return run_reported(lambda: work(_read(path, kind)), path.with_name(RESULT_FILE))


def run_reported(work: Callable[[], None], result_path: Path | None = None) -> int:
    """Do the work; a refusal or a failure meant for a person is printed without a traceback. Return the exit code."""
    result, code = ProgramResult(), 0
    try:
        work()
    except HalfstepError as error:
        print(error, file=sys.stderr)
        result, code = ProgramResult(message=str(error), refused=isinstance(error, RefusedInput)), error.exit_code
    except lifecycle.StopRequested:
        print("stopped before the end; nothing was written", file=sys.stderr)
        lifecycle.end_group()
        return 130
    if result_path:
        write_record(result_path, result)
    return code


def _read(path: Path, kind: type[Request]) -> Request:
    try:
        return read_record(path, kind)
    except (OSError, ValidationError) as error:
        raise RefusedInput(f"request {path} cannot be read as a {kind.__name__}: {error}") from error
