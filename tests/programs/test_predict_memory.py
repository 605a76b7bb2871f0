"""The dry run against what it must count, and one prediction against a measured peak."""

from pathlib import Path
from typing import Any

import pytest

from tasks.files import read_record
from tasks.memory import MB
from tasks.params import BytePromptParams, ScratchModelParams
from tasks.peak_memory import PeakRequest, PredictionRequest
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


def levers_with(**more: Any) -> MemoryLevers:
    return MemoryLevers(
        **{"per_device_train_batch_size": MICRO_BATCH, "gradient_accumulation_steps": 2, "gradient_checkpointing": False, **more}
    )


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "saving": {"gradient_checkpointing": True},
    "lora": {"lora_rank": 16},
    "8bit": {"optimizer_8bit": True, "max_completion_length": 24},
    "compact": {"compact_allocator": True},
}


@pytest.fixture(scope="module")
def predicted(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, MemoryPrediction]:
    """A prediction for each variant in bf16, and for one in fp32 with a reference model, all by one process."""
    folder = tmp_path_factory.mktemp("predictions")
    plain = PeakRequest(
        device_type="cpu",
        precision=precision("bf16"),
        levers=levers_with(),
        prompt_length=read_record(inputs.dataset_dir / MANIFEST_FILE, DatasetManifest).longest_prompt,
        completion_length=COMPLETION,
        beta=0,
    )
    peaks = {name: plain.model_copy(update={"levers": levers_with(**levers)}) for name, levers in VARIANTS.items()}
    peaks["ranks"] = plain.model_copy(update={"num_processes": 2})
    peaks["wide"] = plain.model_copy(update={"precision": precision("fp32"), "beta": 0.1})
    request = PredictionRequest(base_model_dir=inputs.base_model_dir, out_dir=folder, peaks=peaks)
    (folder / "request.json").write_text(request.model_dump_json())
    done = run_module("tasks.programs.predict_memory", str(folder / "request.json"))
    assert done.returncode == 0, done.stderr
    return {name: read_record(folder / name, MemoryPrediction) for name in peaks}


def test_weights_gradients_and_states_are_exact_and_the_levers_and_dtypes_show(
    inputs: Inputs, predicted: dict[str, MemoryPrediction]
) -> None:
    weights = 4 * read_record(inputs.base_model_dir / MANIFEST_FILE, BaseModelManifest).num_parameters
    plain, saving, wide = predicted["plain"], predicted["saving"], predicted["wide"]
    assert plain.phase in ("forward", "backward") and sum(plain.categories.values()) == plain.peak_bytes
    assert plain.categories["gradients"] == pytest.approx(weights, rel=0.01)
    # rotary frequencies count as weights, a step counter for each as states
    assert plain.categories["weights"] == pytest.approx(weights, rel=0.01)
    assert plain.categories["optimizer_states"] == pytest.approx(2 * weights, rel=0.01)
    assert predicted["ranks"].categories["gradient_buckets"] == plain.categories["gradients"]
    # what is cast while it is loaded stands beside the file it comes from
    runtime = plain.categories["runtime"]
    assert predicted["lora"].phases["load"] - runtime == pytest.approx(weights * 6 / 4, rel=0.01)
    assert plain.phases["load"] - runtime == pytest.approx(weights, rel=0.01)
    assert saving.categories["activations"] < 0.6 * plain.categories["activations"]
    assert wide.categories["reference_model"] == weights
    assert wide.categories["logits"] > 1.5 * plain.categories["logits"]
    # what the imports take is seen, and no part of the peak; what a step of a tiny model leaves behind is
    assert plain.import_bytes > 100 * MB
    assert 25 * MB < wide.categories["runtime"] <= plain.categories["runtime"] < 300 * MB


# of 10.7 million weights; adapters of rank 16 on six layers are 0.7 million, and the 0.1 million of the embeddings keep 32 bits
@pytest.mark.parametrize(
    ("variant", "gradients", "states"),
    [
        ("compact", 42_885_120, 85_770_240),
        pytest.param("lora", 2_801_664, 5_603_328, marks=pytest.mark.slow),
        pytest.param("8bit", 42_885_120, 22_400_000, marks=pytest.mark.slow),
        pytest.param("plain", 42_885_120, 85_770_240, marks=pytest.mark.slow),
    ],
)
def test_a_measured_peak_lies_between_the_bounds_of_its_prediction(
    variant: str, gradients: int, states: int, inputs: Inputs, predicted: dict[str, MemoryPrediction], tmp_path: Path
) -> None:
    params = smoke_params(
        max_steps=2, per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=2, max_completion_length=COMPLETION
    )
    outcome = train(params, "bf16", inputs, tmp_path / "attempt", levers=levers_with(**VARIANTS[variant]))
    assert outcome.status == "succeeded" and outcome.peak_memory_bytes is not None
    it = predicted[variant]
    assert it.categories["gradients"] == gradients
    assert it.categories["optimizer_states"] == pytest.approx(states, rel=0.001)
    assert it.least_bytes <= outcome.peak_memory_bytes <= it.most_bytes
    assert variant != "compact" or abs(it.peak_bytes - outcome.peak_memory_bytes) <= 0.15 * it.peak_bytes
