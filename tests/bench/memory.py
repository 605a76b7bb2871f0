"""Predicted against measured peaks of the training program, over models of 3 to 360 million parameters.

Launch: ``make bench-memory`` or ``python -m tests.bench.memory [--full] [--output FILE]``; about 20 minutes on 2 cores, SmolLM2-135M
needs ``make data``. Error is counted on the peak beyond the imports. The points that the constants of tasks/peak_memory.py were taken
from (models T and D) are shown with --full and never scored. Beside it stands what `accelerate estimate-memory` says of training
with Adam, and what is predicted for a 7 B model, for which nothing is measured here.
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
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from tasks.files import read_record
from tasks.levers import baseline_levers
from tasks.memory import MB
from tasks.params import BytePromptParams, Params, ScratchModelParams, load_params
from tasks.peak_memory import PeakRequest, PredictionRequest
from tasks.places import PROJECT_DIR
from tasks.records import MemoryLevers, MemoryPrediction
from tasks.specs import MANIFEST_FILE, BaseModelManifest, BaseModelRequest, DatasetManifest, DatasetRequest
from tests.bench.numerics import DATASET_DIR, MODEL_DIR, machine
from tests.builds import build, run_module
from tests.training_runs import Inputs, precision, smoke_params, train

# hidden size, layers, heads, feed-forward size
MODELS = {
    "T": (64, 2, 4, 128),
    "D": (384, 6, 6, 1024),
    "A": (256, 4, 8, 768),
    "B": (512, 8, 8, 1536),
    "C": (768, 12, 12, 2048),
    "E": (960, 32, 15, 2560),
}
CALIBRATION = frozenset("TD")
GB = 2**30


class Point(NamedTuple):
    """One training run."""

    model: str
    label: str
    checkpointing: bool
    micro_batch: int
    accumulation: int
    completion: int
    lora: int | None = None
    states_8bit: bool = False
    compact: bool = False


POINTS = (
    Point("A", "bf16", False, 16, 2, 64),
    Point("A", "fp16", True, 32, 1, 128),
    Point("A", "fp16", True, 32, 1, 128, compact=True),
    Point("B", "bf16", False, 8, 2, 64),
    Point("B", "fp32", False, 16, 1, 64),
    Point("B", "bf16", True, 16, 2, 128),
    Point("B", "fp32", False, 8, 2, 64, lora=8),
    Point("B", "fp32", False, 8, 2, 64, lora=8, compact=True),
    Point("B", "bf16", False, 16, 2, 128, compact=True),
    Point("C", "bf16", False, 8, 2, 64),
    Point("C", "fp32", True, 16, 1, 32),
    Point("C", "fp16", False, 8, 1, 64),
    Point("C", "bf16", True, 16, 1, 96, lora=16, compact=True),
    Point("C", "fp32", False, 8, 1, 64, compact=True),
    Point("SmolLM2", "bf16", False, 8, 4, 16),
    Point("SmolLM2", "fp16", True, 4, 4, 16),
    Point("SmolLM2", "bf16", False, 8, 2, 16, lora=16, compact=True),
    Point("SmolLM2", "bf16", True, 4, 4, 16, states_8bit=True, compact=True),
    Point("E", "bf16", True, 4, 2, 32, compact=True),
    Point("E", "bf16", False, 4, 2, 32, lora=16, compact=True),
)
MORE_POINTS = (
    Point("B", "fp16", True, 8, 2, 64),
    Point("C", "bf16", False, 8, 2, 64, states_8bit=True),
    Point("SmolLM2", "fp32", True, 4, 4, 32),
    *(Point("D", label, False, 8, 2, 32) for label in ("bf16", "fp32", "fp16")),
    Point("D", "bf16", False, 16, 2, 96),
    Point("D", "fp32", True, 16, 2, 96),
    Point("T", "bf16", False, 16, 1, 16),
    *(
        Point(model, label, checkpointing, micro_batch, 2, completion, lora)
        for model in "AB"
        for label in ("bf16", "fp16", "fp32")
        for checkpointing in (False, True)
        for micro_batch in (8, 16)
        for completion in (32, 128)
        for lora in (None, 8)
    ),
)
# Qwen2.5-7B's shape
SEVEN_B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)


class Result(NamedTuple):
    """What came of one point, in bytes."""

    point: Point
    measured: int
    predicted: MemoryPrediction
    rival: int


def main() -> int:
    """Print a line for each point as it comes, then median and worst error of the scored ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the whole grid (hours), and the points that the constants were taken from")
    parser.add_argument("--output", type=Path, help="also write the tables to this Markdown file")
    asked = parser.parse_args()
    points = [point for point in (*POINTS, *(MORE_POINTS if asked.full else ())) if point.model != "SmolLM2" or MODEL_DIR.is_dir()]
    told, started = _Told(asked.output), time.perf_counter()
    told.say(f"`make bench-memory{' FULL=1' if asked.full else ''}`, {machine()}\n")
    columns = "model | parameters | precision | setting | measured MB | predicted MB | error | bounds MB | accelerate MB"
    for row in (columns, "|".join(9 * ["---"])):
        told.say(f"| {row} |")
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for name in dict.fromkeys(point.model for point in points):
            results += measure([point for point in points if point.model == name], Path(folder), told)
            seconds = time.perf_counter() - started
            sys.stderr.write(f"{len(results)} of {len(points)} settings in {seconds:.0f} s\n")
        told.say(f"\n{summary(results)}")
        told.say(f"\n{seven_billion(Path(folder))}")
    told.say(f"\nin {(time.perf_counter() - started) / 60:.0f} minutes")
    return 0


class _Told:
    def __init__(self, path: Path | None) -> None:
        self._path, self._text = path, "# Predicted and measured peaks\n\n"

    def say(self, text: str) -> None:
        self._text += f"{text}\n"
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        if self._path:
            self._path.write_text(self._text, encoding="utf-8")


def measure(points: list[Point], folder: Path, told: _Told) -> list[Result]:
    """Predict and train every point of one model."""
    inputs = inputs_of(points[0], folder)
    longest = read_record(inputs.dataset_dir / MANIFEST_FILE, DatasetManifest).longest_prompt
    predictions, _ = predict(inputs.base_model_dir, [request(point, params_of(point), longest) for point in points], folder)
    size = read_record(inputs.base_model_dir / MANIFEST_FILE, BaseModelManifest).num_parameters / 1e6
    results = []
    for number, (point, predicted) in enumerate(zip(points, predictions, strict=True)):
        outcome = train(params_of(point), point.label, inputs, folder / f"{point.model}-{number}")
        # rewards that never differ are no matter here
        if outcome.steps_done < outcome.total_steps or outcome.peak_memory_bytes is None:
            raise SystemExit(f"{point} {outcome.status}: {outcome.failure}")
        found = Result(point, outcome.peak_memory_bytes, predicted, accelerates_figure(inputs, point))
        results.append(found)
        error = 100 * (predicted.peak_bytes / found.measured - 1)
        bounds = f"{predicted.least_bytes / MB:.0f} to {predicted.most_bytes / MB:.0f}"
        sizes = f"{found.measured / MB:.0f} | {predicted.peak_bytes / MB:.0f} | {error:+.1f} % | {bounds} | {found.rival / MB:.0f}"
        told.say(f"| {point.model} | {size:.0f} M | {point.label} | {setting(point)} | {sizes} |")
    return results


def setting(point: Point) -> str:
    """Return a point's setting in words."""
    more = [f"checkpointing {'on' if point.checkpointing else 'off'}"]
    more += [f"LoRA {point.lora}"] if point.lora else []
    more += ["8-bit states"] if point.states_8bit else []
    more += ["compact allocator"] if point.compact else []
    return f"{point.micro_batch} x {point.accumulation}, {point.completion} tokens, {', '.join(more)}"


def summary(results: list[Result]) -> str:
    """Return median and worst error over the scored points, beside accelerate's, and whether a verdict would have been wrong."""
    scored = [result for result in results if result.point.model not in CALIBRATION]
    lines = []
    for name, some in (
        ("predicted, compact allocator", [result for result in scored if result.point.compact]),
        ("predicted, glibc's own allocator", [result for result in scored if not result.point.compact]),
        ("predicted, all", scored),
    ):
        lines.append(_errors(name, [result.predicted.peak_bytes / result.measured - 1 for result in some]))
    lines.append(_errors("accelerate estimate-memory", [result.rival / result.measured - 1 for result in scored]))
    large = sum(result.measured >= 2 * result.predicted.import_bytes for result in scored)
    floor = statistics.median(result.predicted.import_bytes for result in scored) / MB
    lines.append(f"{large} of {len(scored)} points take three times the imports ({floor:.0f} MB) or more, imports included")
    above = sum(result.predicted.most_bytes < result.measured for result in scored)
    lines.append(f"above the upper bound, so that it would have been said to fit where it does not: {above} of {len(scored)}")
    below = sum(result.predicted.least_bytes > result.measured for result in scored)
    lines.append(f"below the lower bound, so that it would have been skipped where it fits: {below} of {len(scored)}")
    return "\n\n".join(lines)


def _errors(name: str, found: list[float]) -> str:
    errors = [100 * abs(error) for error in found]
    return f"{name}: median error {statistics.median(errors):.1f} %, worst {max(errors):.1f} % of {len(errors)} points" if errors else name


def seven_billion(folder: Path) -> str:
    """Return what is predicted for a 7 B model on a CUDA device: no weights, nothing measured."""
    SEVEN_B.save_pretrained(folder / "7b")
    lines = ["7 B (Qwen2.5-7B's shape), 1 x 1 completion of 128 tokens after 128 of prompt, predicted for a CUDA device, not measured:"]
    for name, lora in (("full, mixed precision bf16", None), ("LoRA of rank 16 on bfloat16 weights", 16)):
        levers = MemoryLevers(per_device_train_batch_size=1, gradient_accumulation_steps=1, gradient_checkpointing=True, lora_rank=lora)
        peak = PeakRequest(device_type="cuda", precision=precision("bf16"), levers=levers, prompt_length=128, completion_length=128, beta=0)
        (found,), seconds = predict(folder / "7b", [peak], folder)
        bounds = f"{found.least_bytes / GB:.1f} to {found.most_bytes / GB:.1f}"
        lines.append(f"{name}: {found.peak_bytes / GB:.1f} GiB ({bounds}), in {seconds:.1f} s")
    return "\n\n".join(lines)


def predict(model_dir: Path, peaks: list[PeakRequest], folder: Path) -> tuple[list[MemoryPrediction], float]:
    """Run the program that predicts; return what it wrote and the seconds it took."""
    asked = PredictionRequest(base_model_dir=model_dir, out_dir=folder, peaks={f"p{number}": peak for number, peak in enumerate(peaks)})
    (folder / "request.json").write_text(asked.model_dump_json())
    started = time.perf_counter()
    done = run_module("tasks.programs.predict_memory", str(folder / "request.json"))
    if done.returncode:
        raise SystemExit(done.stderr)
    return [read_record(folder / name, MemoryPrediction) for name in asked.peaks], time.perf_counter() - started


def request(point: Point, params: Params, prompt_length: int) -> PeakRequest:
    """Return what is asked for a point."""
    return PeakRequest(
        device_type="cpu",
        precision=precision(point.label),
        levers=baseline_levers(params),
        prompt_length=prompt_length,
        completion_length=point.completion,
        beta=0,
    )


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
    """Return a few steps of a point: optimizer states are there from the second on, and a small model's heap grows on."""
    fields = {
        "max_steps": 3 if point.model in "TDAB" else 2,
        "per_device_train_batch_size": point.micro_batch,
        "gradient_accumulation_steps": point.accumulation,
        "gradient_checkpointing": point.checkpointing,
        "max_completion_length": point.completion,
        "learning_rate": 1e-4,
        "lora_rank": point.lora,
        "optimizer_8bit": point.states_8bit,
        "compact_allocator": point.compact,
    }
    if point.model != "SmolLM2":
        return smoke_params(**fields)
    told = tuple(f"training.{name}={'null' if value is None else str(value).lower()}" for name, value in fields.items())
    return load_params(PROJECT_DIR / "params" / "retrain.yaml", (*told, "memory.retries=[]"))


def accelerates_figure(inputs: Inputs, point: Point) -> int:
    """Return what `accelerate estimate-memory` says of a training step with Adam, in bytes; it knows no batch."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(inputs.base_model_dir), dtype=torch.float32)
    total, _ = calculate_maximum_sizes(model)
    usage = estimate_training_usage(total, "float32" if point.label == "fp32" else "float16")
    return int(max(usage.values()))


if __name__ == "__main__":
    raise SystemExit(main())
