"""The evaluation program as a child process, in each precision (cases G3, G5, P1)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.errors import ScorerFailed
from tasks.files import read_record
from tasks.params import EvaluationParams, Params, RewardParams, TrainingParams
from tasks.program_request import EvaluationBatch, EvaluationRequest, ModelAnswers, ask_program
from tasks.programs import evaluate
from tasks.programs.evaluate import answer_all, complete
from tasks.programs.problems import EVAL_FILE, read_problems
from tasks.records import Precision
from tests.builds import BYTE_PROMPTS

PRECISIONS = {
    "float32": Precision(mixed_precision="no", grad_scaler=False),
    "bfloat16": Precision(mixed_precision="bf16", grad_scaler=False),
    "float16": Precision(mixed_precision="fp16", grad_scaler=True),
}


def request(model_dir: Path, dataset_dir: Path, dtype: str = "float32", **fields: Any) -> EvaluationRequest:
    asked = {"reward": RewardParams(scorer="byte_share"), "tokens": 6, "temperature": 0.0, "out_file": Path("unused"), **fields}
    params = Params(
        dataset=BYTE_PROMPTS,
        reward=asked["reward"],
        training=TrainingParams(max_completion_length=asked["tokens"]),
        evaluation=EvaluationParams(batch_size=5, temperature=asked["temperature"]),
    )
    return EvaluationRequest(
        model_dir=model_dir, dataset_dir=dataset_dir, out_file=asked["out_file"], precision=PRECISIONS[dtype], params=params
    )


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_every_held_out_problem_is_answered_in_the_precision_asked(
    dtype: str, scratch_model_dir: Path, byte_dataset_dir: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    asked = request(scratch_model_dir, byte_dataset_dir, dtype, out_file=tmp_path / "answers.json")
    ask_program("tasks.programs.evaluate", EvaluationBatch(requests=(asked,)), tmp_path, said.append)
    found = read_record(asked.out_file, ModelAnswers)
    problems = read_problems(byte_dataset_dir / EVAL_FILE)
    assert [answer.question for answer in found.answers] == [problem.question for problem in problems]
    assert all(0 <= answer.score <= 1 and len(answer.completion) <= 6 for answer in found.answers)
    assert found.decode_time_ms is not None and found.decode_time_ms > 0
    assert said == [f"answered {count} of 12 held-out problems" for count in (5, 10, 12)]


def test_sampled_answers_are_the_same_for_the_same_model(scratch_model_dir: Path, byte_dataset_dir: Path, tmp_path: Path) -> None:
    answers = []
    for number, temperature in enumerate((1.0, 1.0, 0.01, 0.0)):
        asked = request(scratch_model_dir, byte_dataset_dir, temperature=temperature, out_file=tmp_path / f"{number}.json")
        answer_all(asked)
        answers.append([answer.completion for answer in read_record(asked.out_file, ModelAnswers).answers])
    sampled, again, cooler, greedy = answers
    assert sampled == again
    assert sampled not in (cooler, greedy)


def test_each_batch_takes_the_same_random_numbers_whatever_a_model_drew_before_it(
    scratch_model_dir: Path, byte_dataset_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose answers are longer draws more in a batch, which must not change the numbers of the next."""
    answers = []
    for extra in (0, 3):

        def drawing(*asked: Any, extra: int = extra) -> list[list[int]]:
            found = complete(*asked)
            torch.rand(extra)
            return found

        monkeypatch.setattr(evaluate, "complete", drawing)
        asked = request(scratch_model_dir, byte_dataset_dir, temperature=1.0, out_file=tmp_path / f"{extra}.json")
        answer_all(asked)
        answers.append([answer.completion for answer in read_record(asked.out_file, ModelAnswers).answers])
    assert len(answers[0]) > asked.params.evaluation.batch_size
    assert answers[0] == answers[1]


def test_left_padding_does_not_change_an_answer(scratch_model_dir: Path, byte_dataset_dir: Path) -> None:
    asked = request(scratch_model_dir, byte_dataset_dir)
    tokenizer = AutoTokenizer.from_pretrained(scratch_model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(scratch_model_dir)
    prompts = [problem.prompt for problem in read_problems(byte_dataset_dir / EVAL_FILE)]
    assert len({len(prompt) for prompt in prompts}) > 1
    together = complete(model, tokenizer, prompts, asked)
    assert together == [complete(model, tokenizer, [prompt], asked)[0] for prompt in prompts]


def test_padding_with_the_end_token_cuts_at_the_first_one(scratch_model_dir: Path, byte_dataset_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(scratch_model_dir, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(scratch_model_dir)
    prompts = [problem.prompt for problem in read_problems(byte_dataset_dir / EVAL_FILE)][:4]
    asked = request(scratch_model_dir, byte_dataset_dir)
    free = complete(model, tokenizer, prompts, asked)
    assert all(tokenizer.eos_token_id not in ids for ids in free)
    # the third token of the first answer becomes the end: rows that end there are padded with the same token
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(free[0][2])
    ended = complete(model, tokenizer, prompts, asked)
    for before, after in zip(free, ended, strict=True):
        end = before.index(free[0][2]) + 1 if free[0][2] in before else len(before)
        assert after == before[:end]
    assert len(ended[0]) < len(free[0])


def test_smollm2_ends_its_answers(smollm2_dir: Path, byte_dataset_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16)
    messages = [[{"role": "user", "content": text}] for text in ("Say hello.", "State the final answer: 2 + 2 =")]
    prompts = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = complete(model, tokenizer, prompts, request(smollm2_dir, byte_dataset_dir, "bfloat16", tokens=32))
    assert any(row[-1] == tokenizer.eos_token_id for row in ids)
    assert all(row.count(tokenizer.eos_token_id) <= 1 for row in ids)


def test_a_faulty_scorer_ends_it_with_the_row(scratch_model_dir: Path, byte_dataset_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def score(completions, questions, answers):\n    return [0.5] * 11 + [float('nan')]\n")
    reward = RewardParams(scorer=f"{tmp_path / 'own.py'}:score")
    asked = request(scratch_model_dir, byte_dataset_dir, reward=reward, tokens=1, out_file=tmp_path / "answers.json")
    with pytest.raises(ScorerFailed, match="row 11: the score is nan"):
        answer_all(asked)
    assert not asked.out_file.exists()
