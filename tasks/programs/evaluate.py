"""Answer every held-out problem greedily with one model and score the answers.

Launch: ``python -m tasks.programs.evaluate REQUEST.json`` (an EvaluationRequest). Reads eval.parquet and the model's folder,
writes ``answers.json`` (ModelAnswers) and ``result.json`` beside the request. As in training's rollout, the weights are cast to
the 16-bit dtype (here autocast stays on as well); their dtype is observed and a difference from what was asked is an error.
"""

import argparse
import os
import sys
import time
from pathlib import Path

# set before transformers is imported: nothing is ever asked of a model hub, and no bar fills the log
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tasks.evaluation_files import ANSWERS_FILE, EvaluationRequest, ModelAnswers, ScoredAnswer
from tasks.files import write_record
from tasks.program_request import PROGRESS_PREFIX
from tasks.programs import lifecycle
from tasks.programs.answering import answer_request
from tasks.programs.device_memory import detect_device_type
from tasks.programs.half_precision import fast_fp16_matmul
from tasks.programs.observation import PrecisionMismatch, PrecisionObserver
from tasks.programs.problems import EVAL_FILE, read_problems
from tasks.programs.rewards import load_scorer
from tasks.records import DeviceType


def answer_all(request: EvaluationRequest, out_file: Path) -> None:
    """Answer and score the whole held-out set; the answers go to `out_file`.

    Raises:
        PrecisionMismatch: what was observed is not the precision asked for.
        ScorerFailed: the scorer failed on an answer.
    """
    problems = read_problems(request.dataset_dir / EVAL_FILE)
    scorer = load_scorer(request.reward, request.dataset)
    device_type = detect_device_type()
    tokenizer = AutoTokenizer.from_pretrained(request.model_dir, padding_side="left", local_files_only=True)
    model = _load_model(request, device_type)
    observer = PrecisionObserver()
    observer.attach(model)
    started = time.monotonic()
    completions: list[list[int]] = []
    with fast_fp16_matmul():
        for start in range(0, len(problems), request.batch_size):
            prompts = [problem.prompt for problem in problems[start : start + request.batch_size]]
            completions += complete(model, tokenizer, prompts, request)
            print(f"{PROGRESS_PREFIX}answered {len(completions)} of {len(problems)} held-out problems", flush=True)
    seconds = time.monotonic() - started
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    prompt_tokens = sum(len(ids) for ids in tokenizer([problem.prompt for problem in problems])["input_ids"])
    result = ModelAnswers(
        answers=tuple(
            ScoredAnswer(
                question=problem.question,
                expected=problem.answer,
                completion=text,
                score=score,
                num_tokens=len(ids),
                ended=tokenizer.eos_token_id in ids,
            )
            for problem, text, ids, score in zip(problems, texts, completions, scorer(texts, problems), strict=True)
        ),
        weights_dtype=request.precision.autocast_dtype,
        observed_dtypes=_checked_dtypes(observer, model, request),
        device_type=device_type,
        num_tokens=prompt_tokens + sum(map(len, completions)),
        seconds=seconds,
    )
    write_record(out_file, result)


def _load_model(request: EvaluationRequest, device_type: DeviceType) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        request.model_dir, dtype=getattr(torch, request.precision.autocast_dtype), local_files_only=True, use_safetensors=True
    )
    # torch knows ROCm as 'cuda'
    return model.to("cuda" if device_type == "rocm" else device_type).eval()


def _checked_dtypes(observer: PrecisionObserver, model: PreTrainedModel, request: EvaluationRequest) -> tuple[str, ...]:
    seen, wanted = observer.result(model, scaler_live=False).rollout, request.precision.autocast_dtype
    if seen != (wanted,):
        raise PrecisionMismatch(f"evaluation was asked for in {request.precision.label} ({wanted}) but ran in {', '.join(seen)}")
    return seen


def complete(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], request: EvaluationRequest) -> list[list[int]]:
    """Return greedy completions as token ids, each up to and with its first end token."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    dtype, mixed = getattr(torch, request.precision.autocast_dtype), request.precision.mixed_precision != "no"
    # not inference_mode: under it whole linear layers reach a dispatch mode, and fast_fp16_matmul would let them pass
    with torch.no_grad(), torch.autocast(model.device.type, dtype, enabled=mixed):
        ids = model.generate(
            **batch,
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    return [_up_to_end(row, tokenizer.eos_token_id) for row in ids[:, batch["input_ids"].shape[1] :].tolist()]


def _up_to_end(ids: list[int], end: int) -> list[int]:
    # padding may be the end token itself, so only the first one counts
    return ids[: ids.index(end) + 1] if end in ids else ids


def main() -> int:
    """Do what the request asks."""
    lifecycle.start()
    parser = argparse.ArgumentParser(prog="python -m tasks.programs.evaluate", description=__doc__.partition("\n")[0])
    parser.add_argument("request", type=Path, help="an EvaluationRequest as JSON")
    path: Path = parser.parse_args().request
    return answer_request(path, EvaluationRequest, lambda request: answer_all(request, path.with_name(ANSWERS_FILE)))


if __name__ == "__main__":
    sys.exit(main())
