"""Predicted against measured peaks of the training program, over models of 6 to 135 million parameters.

Launch: ``make bench-memory`` or ``python -m tests.bench.memory [--full] [--output FILE]``. About 10 minutes on 2 cores; needs ``make data``
for SmolLM2-135M, which is left out where it is not there. The points that the constants of tasks/memory.py were taken from
(models T and D) are shown with --full and never scored. Beside it stands what `accelerate estimate-memory` says of training with Adam.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import init_empty_weights
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.files import read_record
from tasks.levers import baseline_levers
from tasks.memory import MB, PeakRequest
from tasks.params import BytePromptParams, Params, ScratchModelParams, load_params
from tasks.places import PROJECT_DIR
from tasks.records import MemoryPrediction
from tasks.specs import MANIFEST_FILE, BaseModelRequest, DatasetManifest, DatasetRequest
from tests.bench.numerics import DATASET_DIR, MODEL_DIR, machine
from tests.builds import build, run_module
from tests.training_runs import Inputs, precision, smoke_params, train

# hidden size, layers, heads, feed-forward size
MODELS = {"T": (64, 2, 4, 128), "D": (384, 6, 6, 1024), "A": (256, 6, 8, 1024), "B": (512, 8, 8, 1536), "C": (640, 10, 8, 2048)}
COLUMNS = (
    "model",
    "precision",
    "checkpointing",
    "micro-batch",
    "completion",
    "measured MB",
    "predicted MB",
    "error",
    "accelerate MB",
    "seconds",
)
CALIBRATION = frozenset("TD")


class Point(NamedTuple):
    """One training run."""

    model: str
    label: str
    checkpointing: bool
    micro_batch: int
    accumulation: int
    completion: int


POINTS = (
    Point("A", "bf16", False, 16, 2, 64),
    Point("A", "fp32", False, 16, 2, 64),
    Point("A", "fp16", False, 16, 2, 64),
    Point("A", "bf16", True, 16, 2, 64),
    Point("A", "bf16", False, 32, 1, 128),
    Point("A", "fp32", True, 8, 4, 128),
    Point("B", "bf16", False, 8, 2, 64),
    Point("B", "fp32", False, 16, 1, 64),
    Point("B", "fp16", True, 8, 2, 64),
    Point("B", "bf16", True, 16, 2, 128),
    Point("C", "bf16", False, 4, 2, 64),
    Point("C", "fp32", True, 4, 2, 32),
    Point("C", "fp16", False, 8, 1, 64),
    Point("SmolLM2", "bf16", False, 8, 4, 8),
    Point("SmolLM2", "fp32", True, 4, 4, 32),
)
MORE_POINTS = (
    Point("D", "bf16", False, 8, 2, 32),
    Point("D", "fp32", False, 8, 2, 32),
    Point("D", "fp16", False, 8, 2, 32),
    Point("D", "bf16", False, 16, 2, 96),
    Point("D", "fp32", True, 16, 2, 96),
    Point("T", "bf16", False, 16, 1, 16),
)


def main() -> int:
    """Print a line for each point as it comes, then median and worst error of the scored ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="also run the points that the constants were taken from")
    parser.add_argument("--output", type=Path, help="also write the table to this Markdown file")
    asked = parser.parse_args()
    points = [point for point in (*POINTS, *(MORE_POINTS if asked.full else ())) if point.model != "SmolLM2" or MODEL_DIR.is_dir()]
    lines = [f"`make bench-memory`, {machine()}", ""]
    lines += [
        "| model | precision | checkpointing | micro-batch | completion | measured MB | predicted MB | error | accelerate MB | seconds |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    sys.stdout.write("\n".join(lines) + "\n")
    errors, rivals = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, point in enumerate(points):
            measured, predicted, rival, seconds = compare(point, Path(folder), number)
            error = predicted.peak_bytes / measured - 1
            if point.model not in CALIBRATION:
                errors.append(error)
                rivals.append(rival / measured - 1)
            size = (
                f"{point.micro_batch} x {point.accumulation} | {point.completion} | {measured / MB:.0f} | {predicted.peak_bytes / MB:.0f}"
            )
            switch = "on" if point.checkpointing else "off"
            lines.append(f"| {point.model} | {point.label} | {switch} | {size} | {100 * error:+.0f} % | {rival / MB:.0f} | {seconds:.0f} |")
            sys.stdout.write(f"{lines[-1]}\n")
            sys.stdout.flush()
    for name, found in (("predicted", errors), ("accelerate estimate-memory", rivals)):
        sizes = [abs(error) for error in found]
        lines.append(
            f"\n{name}: median error {100 * statistics.median(sizes):.1f} %, worst {100 * max(sizes):.1f} % of {len(sizes)} points"
        )
        sys.stdout.write(f"{lines[-1]}\n")
    if asked.output:
        asked.output.write_text("# Predicted and measured peaks\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return 0


def compare(point: Point, folder: Path, number: int) -> tuple[int, MemoryPrediction, int, float]:
    """Return a point's measured peak, its prediction, accelerate's figure (bytes) and how long the prediction took."""
    inputs, params = inputs_of(point, folder), params_of(point)
    started = time.perf_counter()
    predicted = predict(point, params, inputs, folder)
    seconds = time.perf_counter() - started
    outcome = train(params, point.label, inputs, folder / f"attempt-{number}")
    if outcome.status != "succeeded" or outcome.peak_memory_bytes is None:
        raise SystemExit(f"{point} {outcome.status}: {outcome.failure}")
    return outcome.peak_memory_bytes, predicted, accelerates_figure(inputs, point), seconds


def inputs_of(point: Point, folder: Path) -> Inputs:
    """Return a point's base model and dataset, built once."""
    if point.model == "SmolLM2":
        return Inputs(MODEL_DIR, DATASET_DIR)
    model_dir, data_dir = folder / f"{point.model}-model", folder / f"{point.model}-data"
    if not data_dir.is_dir():
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        model = ScratchModelParams.model_validate({"source": "scratch", **dict(zip(names, MODELS[point.model], strict=True))})
        build("tasks.programs.fetch_base_model", BaseModelRequest(base_model=model, out_dir=model_dir), model_dir)
        dataset = BytePromptParams(source="byte_prompts", num_train=128)
        request = DatasetRequest(dataset=dataset, base_model=model, base_model_dir=model_dir, out_dir=data_dir)
        build("tasks.programs.prepare_dataset", request, data_dir)
    return Inputs(model_dir, data_dir)


def params_of(point: Point) -> Params:
    """Return three steps of a point: optimizer states are there from the second on."""
    fields = {
        "max_steps": 3,
        "per_device_train_batch_size": point.micro_batch,
        "gradient_accumulation_steps": point.accumulation,
        "gradient_checkpointing": point.checkpointing,
        "max_completion_length": point.completion,
        "learning_rate": 1e-4,
    }
    if point.model != "SmolLM2":
        return smoke_params(**fields)
    return load_params(PROJECT_DIR / "params" / "retrain.yaml", tuple(f"training.{name}={value}".lower() for name, value in fields.items()))


def predict(point: Point, params: Params, inputs: Inputs, folder: Path) -> MemoryPrediction:
    """Run the program that predicts."""
    request = PeakRequest(
        base_model_dir=inputs.base_model_dir,
        out_file=folder / "prediction.json",
        device_type="cpu",
        precision=precision(point.label),
        levers=baseline_levers(params),
        prompt_length=read_record(inputs.dataset_dir / MANIFEST_FILE, DatasetManifest).longest_prompt,
        completion_length=point.completion,
        beta=0,
    )
    (folder / "request.json").write_text(request.model_dump_json())
    done = run_module("tasks.programs.predict_memory", str(folder / "request.json"))
    if done.returncode:
        raise SystemExit(done.stderr)
    return read_record(request.out_file, MemoryPrediction)


def accelerates_figure(inputs: Inputs, point: Point) -> int:
    """Return what `accelerate estimate-memory` says of a training step with Adam, in bytes; it knows no batch."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(inputs.base_model_dir), dtype=torch.float32)
    total, _ = calculate_maximum_sizes(model)
    usage = estimate_training_usage(total, "float32" if point.label == "fp32" else "float16")
    return int(max(usage.values()))


if __name__ == "__main__":
    raise SystemExit(main())
