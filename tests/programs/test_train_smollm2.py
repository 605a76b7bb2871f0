"""A few real steps of the real base model, in the precision of the baseline and in that of the retry."""

from pathlib import Path

import pytest

from tasks.attempt_files import read_steps
from tasks.params import Params, ReasoningGymParams, SmolLM2Params, load_params
from tasks.places import PROJECT_DIR
from tasks.specs import DatasetRequest
from tests.builds import build
from tests.training_runs import Inputs, train


@pytest.fixture(scope="module")
def params() -> Params:
    overrides = ("training.max_steps=2", "training.gradient_accumulation_steps=1", "dataset.num_train=40", "dataset.num_eval=20")
    return load_params(PROJECT_DIR / "params" / "retrain.yaml", overrides)


@pytest.fixture(scope="module")
def smollm2_inputs(params: Params, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    assert isinstance(params.dataset, ReasoningGymParams)
    out_dir = tmp_path_factory.mktemp("chain_sum") / "data"
    request = DatasetRequest(dataset=params.dataset, base_model=SmolLM2Params(), base_model_dir=smollm2_dir, out_dir=out_dir)
    return Inputs(smollm2_dir, build("tasks.programs.prepare_dataset", request, out_dir))


@pytest.mark.parametrize(("label", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_smollm2_trains_in_what_was_planned(label: str, dtype: str, params: Params, smollm2_inputs: Inputs, tmp_path: Path) -> None:
    outcome = train(params, label, smollm2_inputs, tmp_path)
    # one group of a step may earn the same reward throughout, and then nothing moves: that is said, and is no success
    assert outcome.status in ("succeeded", "diverged"), outcome.failure
    assert outcome.observed is not None
    assert outcome.observed.forward == outcome.observed.backward == outcome.observed.rollout == (dtype,)
    assert outcome.observed.scaler_live == (label == "fp16")
    steps = read_steps(tmp_path)
    assert len(steps) == 2
    moved = any(step["grad_norm"] > 0 for step in steps)
    assert (outcome.status == "succeeded") == moved == bool(outcome.weights_changed)
