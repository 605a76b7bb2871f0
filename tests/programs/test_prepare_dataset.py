"""Datasets: disjoint by construction and by content (G6), long prompts counted (G4), the same bytes every time."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tasks.errors import RefusedInput
from tasks.files import read_record
from tasks.params import BytePromptParams, ReasoningGymParams, load_params
from tasks.places import PROJECT_DIR
from tasks.programs.prepare_dataset import build, render_prompt
from tasks.programs.problems import EVAL_FILE, TRAIN_FILE, Drawn, Row, draw, draw_sets, normalised, read_problems, separate
from tasks.specs import MANIFEST_FILE, DatasetManifest, DatasetRequest, dataset_spec
from tests.builds import BYTE_PROMPTS, SCRATCH, run_module, same_bytes

SMALL_SUMS: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def sums(**fields: Any) -> ReasoningGymParams:
    return ReasoningGymParams(**{"options": SMALL_SUMS, "num_train": 60, "num_eval": 20, **fields})


def request(dataset: ReasoningGymParams | BytePromptParams, base_model_dir: Path, out_dir: Path) -> DatasetRequest:
    return DatasetRequest(dataset=dataset, base_model=SCRATCH, base_model_dir=base_model_dir, out_dir=out_dir)


def questions(rows: tuple[Row, ...]) -> set[str]:
    return {normalised(row.question) for row in rows}


def test_reasoning_gym_itself_repeats_items_where_seed_ranges_overlap() -> None:
    # the trap that the distance between the two ranges is there for
    first, second = ([row.question for row in draw(sums(), seed, 50)] for seed in (7, 17))
    assert first[10:] == second[:40]


@pytest.mark.parametrize(("seed", "num_train"), [(0, 2000), (7, 3000), (999_990, 300), (1_000_000, 300)])
def test_training_and_held_out_sets_share_nothing_and_repeat_nothing(seed: int, num_train: int) -> None:
    drawn = separate(draw_sets(sums(seed=seed, num_train=num_train, num_eval=400)))
    assert not questions(drawn.train) & questions(drawn.held_out)
    assert len(questions(drawn.train)) == len(drawn.train) and len(questions(drawn.held_out)) == len(drawn.held_out)
    assert len(drawn.train) + len(drawn.held_out) + drawn.num_repeats + drawn.num_held_out_in_train == num_train + 400


def test_the_seed_ranges_cannot_overlap() -> None:
    # 20 digits leave no chance repeats: every repeat would be the same seed
    wide = {"min_terms": 2, "max_terms": 2, "min_digits": 20, "max_digits": 20}
    drawn = separate(draw_sets(sums(options=wide, num_train=2000, num_eval=400)))
    assert (drawn.num_repeats, drawn.num_held_out_in_train) == (0, 0)


def test_the_same_question_in_other_spacing_and_case_is_found() -> None:
    train = (Row("What is 1 + 1?", "2", "{}"), Row("What is 2 + 2?", "4", "{}"), Row("what is  2 + 2?", "4", "{}"))
    drawn = separate(Drawn(train, (Row("WHAT IS 1 +  1?\n", "2", "{}"),)))
    assert [row.answer for row in drawn.train] == ["4"]
    assert (drawn.num_repeats, drawn.num_held_out_in_train) == (1, 1)


def test_a_family_with_too_few_problems_is_refused() -> None:
    tiny = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    with pytest.raises(RefusedInput, match="too few problems"):
        separate(draw_sets(sums(options=tiny, num_eval=500)))


def test_the_default_run_has_enough_held_out_problems() -> None:
    drawn = separate(draw_sets(load_params(PROJECT_DIR / "params" / "retrain.yaml").dataset))
    assert len(drawn.held_out) >= 150 and len(drawn.train) >= 160


def test_byte_prompts_are_distinct_short_words(byte_dataset_dir: Path) -> None:
    train, held_out = (read_problems(byte_dataset_dir / name) for name in (TRAIN_FILE, EVAL_FILE))
    assert (len(train), len(held_out)) == (24, 12) == (BYTE_PROMPTS.num_train, BYTE_PROMPTS.num_eval)
    prompts = [problem.prompt for problem in train + held_out]
    assert len(set(prompts)) == 36 and all(prompt.replace(" ", "").islower() for prompt in prompts)
    assert {(problem.answer, problem.entry) for problem in train} == {("", "{}")}


def test_the_same_spec_gives_the_same_bytes(byte_dataset_dir: Path, scratch_model_dir: Path, tmp_path: Path) -> None:
    build(request(BYTE_PROMPTS, scratch_model_dir, tmp_path / "again"))
    assert same_bytes(byte_dataset_dir, tmp_path / "again")
    assert b"pandas" not in (byte_dataset_dir / TRAIN_FILE).read_bytes()
    build(request(BYTE_PROMPTS.model_copy(update={"seed": 1}), scratch_model_dir, tmp_path / "other"))
    assert not same_bytes(byte_dataset_dir, tmp_path / "other")


def test_the_manifest_names_the_spec_and_the_counts(scratch_model_dir: Path, tmp_path: Path) -> None:
    build(request(sums(), scratch_model_dir, tmp_path / "sums"))
    manifest = read_record(tmp_path / "sums" / MANIFEST_FILE, DatasetManifest)
    train, held_out = (read_problems(tmp_path / "sums" / name) for name in (TRAIN_FILE, EVAL_FILE))
    assert manifest.spec == dataset_spec(sums(), SCRATCH)
    assert (manifest.num_train, manifest.num_eval) == (len(train), len(held_out))
    assert manifest.num_train + manifest.num_eval + manifest.num_repeats + manifest.num_held_out_in_train == 80
    assert json.loads(train[0].entry)["answer"] == train[0].answer
    assert train[0].prompt == train[0].question  # no chat template, no instruction


def test_a_prompt_has_instruction_chat_template_and_answer_prefix(scratch_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(scratch_model_dir)
    asked = sums(instruction="Be brief.", answer_prefix="It is")
    assert render_prompt("1 + 1 =", asked, tokenizer) == "Be brief.\n1 + 1 =It is"
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
    )
    assert render_prompt("1 + 1 =", asked, tokenizer) == "[system]Be brief.[user]1 + 1 =[bot]It is"


def test_long_prompts_are_dropped_and_counted(scratch_model_dir: Path, tmp_path: Path) -> None:
    prompts = BYTE_PROMPTS.model_copy(update={"num_train": 300, "max_prompt_length": 16, "max_dropped_share": 0.5})
    build(request(prompts, scratch_model_dir, tmp_path / "short"))
    manifest = read_record(tmp_path / "short" / MANIFEST_FILE, DatasetManifest)
    assert manifest.num_dropped > 0 and manifest.num_train + manifest.num_eval + manifest.num_dropped == 312
    assert manifest.longest_prompt <= 16
    assert all(len(problem.prompt) <= 16 for problem in read_problems(tmp_path / "short" / TRAIN_FILE))


def test_too_many_long_prompts_stop_it_and_leave_nothing(scratch_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedInput, match=r"\d+ of \d+ prompts are longer than dataset.max_prompt_length = 16 tokens"):
        build(request(sums(max_prompt_length=16), scratch_model_dir, tmp_path / "none"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "chain_sums"}, "'chain_sums' is none of reasoning-gym's 1.. families; near names: chain_sum"),
        ({"options": {"max_term": 2}}, "options.max_term is no option of family 'chain_sum'; known: .*max_terms"),
        ({"options": {"seed": 2}}, r"options.seed is no option .*dataset.seed, num_train and num_eval decide seed"),
        ({"options": {"min_terms": 0}}, "refused by family 'chain_sum': min_terms must be positive"),
        ({"options": {"min_terms": "two"}}, "refused by family 'chain_sum'"),
        ({"options": {"min_terms": 1.5}}, "family 'chain_sum' with dataset.options .* raised"),
        ({"family": "rearc", "options": {}}, "the verifier of family 'rearc' gives its own answer .* instead of 1"),
    ],
)
def test_what_reasoning_gym_cannot_do_is_one_message(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedInput, match=message):
        draw_sets(sums(num_train=3, num_eval=3, **fields))


def test_a_folder_of_another_base_model_is_refused(scratch_model_dir: Path, tmp_path: Path) -> None:
    other = SCRATCH.model_copy(update={"seed": 9})
    asked = DatasetRequest(dataset=BYTE_PROMPTS, base_model=other, base_model_dir=scratch_model_dir, out_dir=tmp_path / "none")
    with pytest.raises(RefusedInput, match="asked for"):
        build(asked)
    with pytest.raises(RefusedInput, match="is no base model"):
        build(request(BYTE_PROMPTS, tmp_path, tmp_path / "none"))


def test_the_program_refuses_with_one_message_and_code_2(tmp_path: Path) -> None:
    params = tmp_path / "bad.yaml"
    params.write_text("dataset: {source: reasoning_gym, num_trian: 5}\n")
    done = run_module("tasks.programs.prepare_dataset", "--params", str(params), "--base-model", "none", "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "dataset.num_trian: unknown key" in done.stderr and "Traceback" not in done.stderr
