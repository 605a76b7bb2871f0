"""What child programs have in common: they die with their parent, end on SIGTERM, and answer a request."""

import argparse
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

from pydantic import ValidationError

from tasks.errors import HalfstepError, RefusedInput
from tasks.files import read_record, write_record
from tasks.params import load_params
from tasks.processes import PARENT_VARIABLE, die_with_parent
from tasks.program_request import RESULT_FILE, ProgramResult
from tasks.records import Record

Request = TypeVar("Request", bound=Record)


class StopRequested(BaseException):
    """SIGTERM arrived: the parent wants an end, or is gone."""


def start() -> None:
    """Tie this process to its parent: when the parent dies, SIGTERM comes, raised here as `StopRequested`."""
    # off while the libraries were imported; what they left is no garbage, and is not looked through again, at the exit neither
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGTERM, _raise_stop)
    die_with_parent(signal.SIGTERM)
    expected = os.environ.get(PARENT_VARIABLE)
    if expected is not None and os.getppid() != int(expected):
        raise SystemExit("the parent process is gone")


def end_group() -> None:
    """Kill every process of this program's group, itself included, if it leads one (called after a stop)."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)


def _raise_stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise StopRequested


def main(kind: type[Request], work: Callable[[Request], None], about: str, **folders: str) -> int:
    """Do what the command line asks: a REQUEST.json, or the sections of a params file and each folder as an option.

    `folders` names the request's folders with their help; without any, there must be a REQUEST.json, beside which
    ``result.json`` is written. Returns the exit code.
    """
    start()
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("request", nargs="?" if folders else None, type=Path, help=f"a {kind.__name__} as JSON")
    options = {"params": "params file to take the request from", **folders} if folders else {}
    for name, text in options.items():
        parser.add_argument(f"--{name.removesuffix('_dir').replace('_', '-')}", type=Path, dest=name, help=text)
    asked = vars(parser.parse_args())
    file: Path | None = asked.pop("request")
    if not file and not all(asked.values()):
        parser.error("give either REQUEST.json or all of the options")

    def request() -> Request:
        if not file:
            fields = {**dict(load_params(asked["params"])), **asked}
            return kind.model_validate({name: fields[name] for name in kind.model_fields})
        try:
            return read_record(file, kind)
        except (OSError, ValidationError) as error:
            raise RefusedInput(f"request {file} cannot be read as a {kind.__name__}: {error}") from error

    return run_reported(lambda: work(request()), file and file.with_name(RESULT_FILE))


def run_reported(work: Callable[[], None], result_path: Path | None = None) -> int:
    """Do the work; a refusal or a failure meant for a person is printed without a traceback. Return the exit code."""
    result, code = ProgramResult(), 0
    try:
        work()
    except HalfstepError as error:
        print(error, file=sys.stderr)
        result, code = ProgramResult(message=str(error), refused=isinstance(error, RefusedInput)), error.exit_code
    except StopRequested:
        print("stopped before the end; nothing was written", file=sys.stderr)
        end_group()
        return 130
    if result_path:
        write_record(result_path, result)
    return code
