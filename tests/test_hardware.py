"""The step that detects the hardware in a child process."""

from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from tasks.errors import ProgramFailed
from tasks.files import read_record
from tasks.hardware import detect_hardware
from tasks.hardware_support import judge
from tasks.machine_facts import MachineFacts
from tasks.records import Hardware


def test_the_record_is_returned_and_kept(tmp_path: Path) -> None:
    with disable_run_logger():
        hardware = detect_hardware.fn(tmp_path)
    assert hardware == read_record(tmp_path / "hardware.json", Hardware)
    assert hardware == judge(read_record(tmp_path / "detect" / "facts.json", MachineFacts))


def test_a_detector_without_a_result_is_an_error_with_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch cannot be imported: a broken installation
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    with pytest.raises(ProgramFailed, match=r"(?s)tasks\.programs\.detect ended with code 1 .*libcudart\.so\.13"):
        detect_hardware.fn(tmp_path)
