"""The dry run against what it must count, and one prediction against a measured peak."""

from pathlib import Path

import pytest

from tasks.files import read_record
from tasks.memory import PeakRequest
from tasks.params import BytePromptParams, ScratchModelParams
from tasks.records import MemoryLevers, MemoryPrediction
from tasks.specs import MANIFEST_FILE, BaseModelManifest, BaseModelRequest, DatasetManifest, DatasetRequest
from tests.builds import build, run_module
from tests.training_runs import Inputs, precision, smoke_params, train

MICRO_BATCH, COMPLETION = 8, 48


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A model of 11 million parameters: its peak is several times what libraries take."""
    folder = tmp_path_factory.mktemp("predicted")
    model = ScratchModelParams(source="scratch", hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1024)
    model_dir = build("tasks.programs.fetch_base_model", BaseModelRequest(base_model=model, out_dir=folder / "model"), folder / "model")
    dataset = BytePromptParams(source="byte_prompts", num_train=64)
    request = DatasetRequest(dataset=dataset, base_model=model, base_model_dir=model_dir, out_dir=folder / "data")
    return Inputs(model_dir, build("tasks.programs.prepare_dataset", request, folder / "data"))


def predict(inputs: Inputs, folder: Path, label: str = "bf16", checkpointing: bool = False, **more: object) -> MemoryPrediction:
    levers = MemoryLevers(per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=2, gradient_checkpointing=checkpointing)
    request = PeakRequest(
        base_model_dir=inputs.base_model_dir,
        out_file=folder / "prediction.json",
        device_type="cpu",
        precision=precision(label),
        levers=levers,
        prompt_length=read_record(inputs.dataset_dir / MANIFEST_FILE, DatasetManifest).longest_prompt,
        completion_length=COMPLETION,
        beta=0,
    ).model_copy(update=more)
    (folder / "request.json").write_text(request.model_dump_json())
    done = run_module("tasks.programs.predict_memory", str(folder / "request.json"))
    assert done.returncode == 0, done.stderr
    return read_record(folder / "prediction.json", MemoryPrediction)


def test_weights_gradients_and_states_are_exact_and_the_levers_and_dtypes_show(inputs: Inputs, tmp_path: Path) -> None:
    weights = 4 * read_record(inputs.base_model_dir / MANIFEST_FILE, BaseModelManifest).num_parameters
    plain = predict(inputs, tmp_path)
    assert plain.phase in ("forward", "backward") and sum(plain.categories.values()) == plain.peak_bytes
    assert plain.categories["gradients"] == pytest.approx(weights, rel=0.01)
    # rotary frequencies count as weights, a step counter for each as states
    assert plain.categories["weights"] == pytest.approx(weights, rel=0.01)
    assert plain.categories["optimizer_states"] == pytest.approx(2 * weights, rel=0.01)
    saving = predict(inputs, tmp_path, checkpointing=True)
    assert saving.categories["activations"] < 0.6 * plain.categories["activations"]
    wide = predict(inputs, tmp_path, label="fp32", beta=0.1)
    assert wide.categories["reference_model"] == weights
    assert wide.categories["logits"] > 1.5 * plain.categories["logits"]


def test_the_prediction_is_within_its_error_bound_of_a_measured_peak(inputs: Inputs, tmp_path: Path) -> None:
    params = smoke_params(
        max_steps=3, per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=2, max_completion_length=COMPLETION
    )
    outcome = train(params, "bf16", inputs, tmp_path / "attempt")
    assert outcome.status == "succeeded" and outcome.peak_memory_bytes is not None
    predicted = predict(inputs, tmp_path)
    assert abs(predicted.peak_bytes - outcome.peak_memory_bytes) <= predicted.error_bytes < 0.151 * predicted.peak_bytes
