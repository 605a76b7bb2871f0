"""What fp16 and bf16 do to SmolLM2-135M's numbers, against fp32, and how fast fp16 is on this CPU.

Launch: ``make bench-numerics`` or ``python -m tests.bench.numerics [--output FILE]``. Needs ``make data``. About 6 minutes on 2 cores.
Speeds are measured side by side in one process and printed as ratios; errors do not depend on the machine's load.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from tasks.attempt_files import read_steps
from tasks.params import Params, load_params
from tasks.places import PROJECT_DIR
from tasks.programs.half_precision import cpu_computes, fast_half_matmul
from tasks.programs.problems import TRAIN_FILE, read_problems
from tests.training_runs import Inputs, train

MODEL_DIR = PROJECT_DIR / "data" / "base_models" / "smollm2-135m-instruct"
DATASET_DIR = PROJECT_DIR / "data" / "datasets" / "chain_sum"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SCALE = 65536.0
# ServiceNow/Fast-LLM pull request 525, SmolLM2-135M: RMS relative error of the chosen token's log-probability
PUBLISHED = {"bf16": "0.473 %", "bf16 + fp32 head": "0.371 %", "fp16": "0.057 %"}


def main() -> int:
    """Print the three tables; keep them as Markdown if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the tables to this Markdown file")
    output: Path | None = parser.parse_args().output
    logging.disable_progress_bar()
    if not MODEL_DIR.is_dir() or not DATASET_DIR.is_dir():
        sys.stderr.write("the base model and dataset are not there; run `make data` first\n")
        return 2
    text = [f"`make bench-numerics`, {machine()}, torch {torch.__version__}"]
    sys.stdout.write(text[0] + "\n")
    for table in (speed_table, error_table, mismatch_table):
        text.append(table())
        sys.stdout.write(f"\n{text[-1]}\n")
    if output:
        output.write_text("# Numerics of SmolLM2-135M\n\n" + "\n\n".join(text) + "\n", encoding="utf-8")
    return 0


def machine() -> str:
    """Return the processor's name and the number of threads."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").is_file() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{name}, {torch.get_num_threads()} threads"


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask (rows, tokens) of real prompts with their answers, left-padded."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, padding_side="left", local_files_only=True)
    texts = [f"{row.prompt} {row.answer}" for row in read_problems(DATASET_DIR / TRAIN_FILE)[:rows]]
    encoded = tokenizer(texts, return_tensors="pt", padding=True)
    return encoded["input_ids"], encoded["attention_mask"]


def load() -> PreTrainedModel:
    """Load the model as training does."""
    return AutoModelForCausalLM.from_pretrained(
        MODEL_DIR, dtype=torch.float32, attn_implementation="eager", local_files_only=True, use_safetensors=True
    )


@contextlib.contextmanager
def computing_in(label: str, *, redirected: bool = True) -> Iterator[None]:
    """Autocast to a precision; 16-bit products as training runs them, or by torch's own kernels."""
    redirect = fast_half_matmul("cpu", DTYPES[label]) if redirected else contextlib.nullcontext()
    with redirect:
        if label == "fp32":
            yield
        else:
            with torch.autocast("cpu", dtype=getattr(torch, DTYPES[label])):
                yield


def log_probs(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, *, fp32_head: bool = False) -> torch.Tensor:
    """Return the log-probability (rows, tokens - 1) of each next token, in nats."""
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
    with torch.autocast("cpu", enabled=False) if fp32_head else contextlib.nullcontext():
        logits = torch.nn.functional.linear(hidden.float() if fp32_head else hidden, model.lm_head.weight)
    return logits.float().log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]


def step_seconds(model: PreTrainedModel, label: str, ids: torch.Tensor, mask: torch.Tensor, *, redirected: bool = True) -> float:
    """Time one forward and backward."""
    model.zero_grad()
    started = time.perf_counter()
    with computing_in(label, redirected=redirected):
        loss = -log_probs(model, ids, mask).mean()
        (loss * (SCALE if label == "fp16" else 1.0)).backward()
    return time.perf_counter() - started


def speed_table() -> str:
    """Compare fp16 on this CPU, as training runs it, with torch's own fp16 and the other precisions."""
    model, (ids, mask) = load(), batch(4)
    step_seconds(model, "fp32", ids, mask)
    runs: dict[str, Callable[[], float]] = {
        "fp16, products in fp32": lambda: step_seconds(model, "fp16", ids, mask),
        "bf16, as training runs it": lambda: step_seconds(model, "bf16", ids, mask),
        "fp32": lambda: step_seconds(model, "fp32", ids, mask),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):
        for name, run in runs.items():
            seconds[name].append(run())
    seconds["fp16, torch's own"] = [step_seconds(model, "fp16", ids, mask, redirected=False)]
    ours = statistics.median(seconds["fp16, products in fp32"])
    itself = [label for label in ("fp16", "bf16") if cpu_computes(DTYPES[label])]
    note = f" (this CPU computes {' and '.join(itself)} itself: not redirected)" if itself else ""
    lines = [
        f"Forward and backward of {ids.numel()} tokens, median seconds, and how many times the first row's{note}:",
        "",
        "| precision | s | ratio |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {statistics.median(times):.2f} | {statistics.median(times) / ours:.1f} |" for name, times in seconds.items()]
    return "\n".join(lines)


def error_table() -> str:
    """Compare log-probabilities and one step's gradient with fp32's, on the same tokens."""
    model, (ids, mask) = load(), batch(8)
    wanted = mask[:, 1:].bool() & mask[:, :-1].bool()
    advantages = torch.linspace(-1, 1, len(ids))[:, None]
    reference: tuple[torch.Tensor, torch.Tensor] | None = None
    lines = [
        "One step's gradient and log-probabilities against fp32, the same tokens:",
        "",
        "| precision | RMS error of log-prob, nats | relative | gradient: relative error | cosine |",
        "|---|---|---|---|---|",
    ]
    for name, label, head in (
        ("fp32", "fp32", False),
        ("bf16", "bf16", False),
        ("bf16 + fp32 head", "bf16", True),
        ("fp16", "fp16", False),
    ):
        model.zero_grad()
        scale = SCALE if label == "fp16" else 1.0
        with computing_in(label):
            found = log_probs(model, ids, mask, fp32_head=head)
            (-(found * advantages * wanted).sum() / wanted.sum() * scale).backward()
        gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()]).double() / scale
        values = found.detach()[wanted]
        if reference is None:
            reference = (values, gradient)
            continue
        rms = (values - reference[0]).square().mean().sqrt()
        error = (gradient - reference[1]).norm() / reference[1].norm()
        cosine = torch.nn.functional.cosine_similarity(gradient, reference[1], dim=0)
        lines.append(
            f"| {name} | {rms:.2e} | {100 * rms / reference[0].square().mean().sqrt():.3f} % | {100 * error:.2f} % | {cosine:.6f} |"
        )
    return "\n".join(lines)


def mismatch_table() -> str:
    """Train two steps of each variant and read the mismatch between rollout and training."""
    lines = [
        "Training-inference mismatch (rollout with KV cache against the training forward, same tokens, weights, temperature):",
        "",
        "| variant | KL, nats | RMS, nats | max, nats | RMS relative to the log-prob's | published (Fast-LLM PR 525) |",
        "|---|---|---|---|---|---|",
    ]
    variants = (("fp32", "fp32", False), ("bf16", "bf16", False), ("bf16 + fp32 head", "bf16", True), ("fp16", "fp16", False))
    for name, label, head in variants:
        with tempfile.TemporaryDirectory() as folder:
            fields = {"lm_head_fp32": head}
            outcome = train(variant_params(), label, Inputs(MODEL_DIR, DATASET_DIR), Path(folder) / "attempt", fields=fields)
            if outcome.failure is not None:
                lines.append(f"| {name} | {outcome.status}: {outcome.failure.message} |  |  |  |  |")
                continue
            steps = read_steps(Path(folder) / "attempt")
        mean = {key: statistics.mean(step[key] for step in steps) for key in ("mismatch_kl", "mismatch_rms", "mismatch_relative")}
        worst = max(step["mismatch_max"] for step in steps)
        lines.append(
            f"| {name} | {mean['mismatch_kl']:.2e} | {mean['mismatch_rms']:.2e} | {worst:.2e} "
            f"| {100 * mean['mismatch_relative']:.4f} % | {PUBLISHED.get(name, '')} |"
        )
    return "\n".join(lines)


def variant_params() -> Params:
    """Return the default run's params, two steps long, with completions long enough to fill a KV cache."""
    overrides = ("training.max_steps=2", "training.max_completion_length=32", "training.learning_rate=1.0e-6")
    return load_params(PROJECT_DIR / "params" / "retrain.yaml", overrides)


if __name__ == "__main__":
    raise SystemExit(main())
