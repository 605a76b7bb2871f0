"""How a program is asked, and how its end is told."""

import sys
from pathlib import Path

import pytest

from tasks.errors import HalfstepError, ProgramFailed, RefusedInput
from tasks.files import GrowingFile, read_record
from tasks.params import ScratchModelParams
from tasks.program_request import REQUEST_FILE, RESULT_FILE, ProgramResult, ask_program
from tasks.programs import lifecycle
from tasks.programs.lifecycle import main, run_reported
from tasks.specs import BaseModelRequest


def a_request(folder: Path) -> BaseModelRequest:
    return BaseModelRequest(base_model=ScratchModelParams(source="scratch"), out_dir=folder / "out")


def test_a_program_without_a_result_is_told_from_its_log(tmp_path: Path) -> None:
    (tmp_path / RESULT_FILE).write_text("of an earlier time")
    with pytest.raises(ProgramFailed, match=r"(?s)json\.tool ended with code 0 and without a result.*\"base_model\""):
        ask_program("json.tool", a_request(tmp_path), tmp_path, print)


@pytest.mark.parametrize(("error", "code"), [(RefusedInput("asked for too much"), 2), (HalfstepError("it broke"), 1)])
def test_what_a_program_says_comes_back(tmp_path: Path, error: HalfstepError, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise error

    assert run_reported(work, tmp_path / RESULT_FILE) == code
    assert read_record(tmp_path / RESULT_FILE, ProgramResult) == ProgramResult(message=str(error), refused=code == 2)
    assert capsys.readouterr().err == f"{error}\n"


def test_a_request_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / REQUEST_FILE).write_text("{}")
    monkeypatch.setattr(sys, "argv", ["program", str(tmp_path / REQUEST_FILE)])
    monkeypatch.setattr(lifecycle, "start", lambda: None)
    assert main(BaseModelRequest, print, "a program") == 2
    assert "cannot be read as a BaseModelRequest" in read_record(tmp_path / RESULT_FILE, ProgramResult).message


def test_a_growing_file_is_read_line_by_line_and_once(tmp_path: Path) -> None:
    said: list[str] = []
    log = tmp_path / "program.log"
    growing = GrowingFile(log)
    assert growing.new_lines() == []
    for text in ("noise\nprogress: one\nprogress: tw", "o\n", "", "progress: three\n\n"):
        with log.open("a") as stream:
            stream.write(text)
        said += growing.new_lines()
    assert said == ["noise", "progress: one", "progress: two", "progress: three", ""]
