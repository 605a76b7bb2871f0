"""Answer every held-out problem with one model after the other and score the answers.

Launch: ``python -m tasks.programs.evaluate REQUEST.json`` (an EvaluationBatch). For each request reads eval.parquet and the
model's folder and writes ModelAnswers to its `out_file`; at the end ``result.json`` beside the request. As in training's rollout,
the weights are cast to the 16-bit dtype (here autocast stays on as well); their dtype is observed and a difference from what was
asked is an error. Sampled answers take the same random numbers for every model.
"""

import gc
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tasks.files import write_record
from tasks.program_request import PROGRESS_PREFIX, EvaluationBatch, EvaluationRequest, ModelAnswers, ScoredAnswer
from tasks.programs import lifecycle
from tasks.programs.device_memory import detect_device_type
from tasks.programs.half_precision import fast_half_matmul, read_head_once
from tasks.programs.observation import PrecisionMismatch, PrecisionObserver
from tasks.programs.problems import EVAL_FILE, read_problems
from tasks.programs.rewards import load_scorer

SAMPLING_SEED = 0


def answer_batch(batch: EvaluationBatch) -> None:
    """Answer each request; the memory of one model is free before the next is loaded."""
    for request in batch.requests:
        answer_all(request)
        # modules lie in reference cycles
        gc.collect()


def answer_all(request: EvaluationRequest) -> None:
    """Answer and score the whole held-out set.

    Raises:
        PrecisionMismatch: what was observed is not the precision asked for.
        ScorerFailed: the scorer failed on an answer.
    """
    problems, size = read_problems(request.dataset_dir / EVAL_FILE), request.params.evaluation.batch_size
    scorer = load_scorer(request.params.reward, request.params.dataset)
    tokenizer = AutoTokenizer.from_pretrained(request.model_dir, padding_side="left", local_files_only=True)
    device_type, dtype = detect_device_type(), request.precision.autocast_dtype
    model = AutoModelForCausalLM.from_pretrained(
        request.model_dir, dtype=getattr(torch, dtype), local_files_only=True, use_safetensors=True
    )
    # torch knows ROCm as 'cuda'
    model = model.to("cuda" if device_type == "rocm" else device_type).eval()
    observer = PrecisionObserver()
    observer.attach(model)
    read_head_once(model)
    completions: list[list[int]] = []
    times: list[float] = []
    with fast_half_matmul(device_type, dtype):
        for start in range(0, len(problems), size):
            prompts = [problem.prompt for problem in problems[start : start + size]]
            # so that models differ by their weights and not by their luck; each batch anew, as they may draw more or less in one
            torch.manual_seed(SAMPLING_SEED + start)
            started = time.perf_counter()
            answered = complete(model, tokenizer, prompts, request)
            times.append(1000 * (time.perf_counter() - started) / max(map(len, answered)))
            completions += answered
            print(f"{PROGRESS_PREFIX}answered {len(completions)} of {len(problems)} held-out problems", flush=True)
    seen = observer.result(model, scaler_live=False).rollout
    if seen != (dtype,):
        raise PrecisionMismatch(f"evaluation was asked for in {request.precision.label} ({dtype}) but ran in {', '.join(seen)}")
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    answers = tuple(
        ScoredAnswer(question=problem.question, expected=problem.answer, completion=text, score=score)
        for problem, text, score in zip(problems, texts, scorer(texts, problems), strict=True)
    )
    write_record(request.out_file, ModelAnswers(answers=answers, decode_time_ms=statistics.median(times[1:] or times)))


def complete(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], request: EvaluationRequest) -> list[list[int]]:
    """Return completions as token ids, each up to and with its first end token; greedy ones if the temperature is 0."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    dtype, mixed = getattr(torch, request.precision.autocast_dtype), request.precision.mixed_precision != "no"
    sampling: dict[str, Any] = {"do_sample": False}
    if request.params.evaluation.temperature:
        # as training's rollout samples; generate would take the 50 likeliest, or what the model's folder says
        sampling = {"do_sample": True, "temperature": request.params.evaluation.temperature, "top_k": 0, "top_p": 1.0}
    # not inference_mode: under it whole linear layers reach a dispatch mode, and fast_half_matmul would let them pass
    with torch.no_grad(), torch.autocast(model.device.type, dtype, enabled=mixed):
        ids = model.generate(
            **batch,
            max_new_tokens=request.params.training.max_completion_length,
            **sampling,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    completions, end = ids[:, batch["input_ids"].shape[1] :].tolist(), tokenizer.eos_token_id
    # padding may be the end token itself, so only the first one counts
    return [row[: row.index(end) + 1] if end in row else row for row in completions]


if __name__ == "__main__":
    raise SystemExit(lifecycle.main(EvaluationBatch, answer_batch, __doc__))
