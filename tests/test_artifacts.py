"""Base model and dataset of a run: built once by real programs, found afterwards, refused with the program's own words."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from tasks import artifacts
from tasks.artifacts import fetch_base_model, prepare_dataset
from tasks.errors import RefusedInput
from tasks.params import Params
from tasks.program_request import REQUEST_FILE
from tests.builds import BYTE_PROMPTS, SCRATCH

PARAMS = Params.model_validate(
    {"base_model": SCRATCH.model_dump(), "dataset": BYTE_PROMPTS.model_dump(), "reward": {"scorer": "byte_share"}}
)


def test_inputs_are_built_once_and_a_bad_request_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "STORE_DIR", tmp_path / "state" / "store")
    with disable_run_logger():
        base_model = fetch_base_model.fn(PARAMS, tmp_path / "first")
        dataset = prepare_dataset.fn(PARAMS, base_model, tmp_path / "first")
        assert (dataset.num_train, dataset.num_eval, dataset.num_dropped) == (24, 12, 0)
        assert (dataset.version.path / "train.parquet").is_file() and (base_model.path / "model.safetensors").is_file()
        assert fetch_base_model.fn(PARAMS, tmp_path / "second") == base_model
        assert prepare_dataset.fn(PARAMS, base_model, tmp_path / "second") == dataset
        assert not (tmp_path / "second").exists()
        long = PARAMS.model_copy(update={"dataset": BYTE_PROMPTS.model_copy(update={"max_prompt_length": 4})})
        with pytest.raises(RefusedInput, match=r"36 of 36 prompts are longer than dataset.max_prompt_length = 4 tokens"):
            prepare_dataset.fn(long, base_model, tmp_path / "third")
    assert (tmp_path / "third" / "datasets" / REQUEST_FILE).is_file()


def test_of_two_runs_that_need_the_same_new_input_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(artifacts, "STORE_DIR", tmp_path / "state" / "store")
    monkeypatch.setattr(artifacts, "get_run_logger", lambda: logging.getLogger("artifacts"))
    with ThreadPoolExecutor() as pool, caplog.at_level(logging.INFO, "artifacts"):
        versions = list(pool.map(fetch_base_model.fn, (PARAMS, PARAMS), (tmp_path / "first", tmp_path / "second")))
    assert versions[0] == versions[1]
    assert len(list(tmp_path.glob("*/base_models"))) == 1
    assert sum("another run" in text or "already built" in text for text in caplog.messages) == 2
