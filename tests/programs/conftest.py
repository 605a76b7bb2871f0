"""Models from scratch and their datasets, built once by the programs that a run uses."""

from pathlib import Path

import pytest

from tasks.params import BytePromptParams, ScratchModelParams
from tasks.specs import BaseModelRequest, DatasetRequest
from tests.builds import build
from tests.training_runs import Inputs


@pytest.fixture(scope="session")
def scratch_inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """The smallest model."""
    model = ScratchModelParams(source="scratch", hidden_size=64, num_hidden_layers=2)
    return _build_inputs(model, tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="session")
def deep_inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A model deep enough for activations to show beside all else that a process takes."""
    model = ScratchModelParams(source="scratch", hidden_size=128, num_hidden_layers=8, intermediate_size=512)
    return _build_inputs(model, tmp_path_factory.mktemp("deep"))


def _build_inputs(model: ScratchModelParams, folder: Path) -> Inputs:
    base_model_dir = build(
        "tasks.programs.fetch_base_model", BaseModelRequest(base_model=model, out_dir=folder / "model"), folder / "model"
    )
    dataset = BytePromptParams(source="byte_prompts", num_train=64)
    request = DatasetRequest(dataset=dataset, base_model=model, base_model_dir=base_model_dir, out_dir=folder / "data")
    return Inputs(base_model_dir, build("tasks.programs.prepare_dataset", request, folder / "data"))
