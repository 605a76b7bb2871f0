"""Bad input: one message that names the field, what was found and what is allowed."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.errors import RefusedInput
from tasks.levers import baseline_levers, retry_levers
from tasks.params import Params, described_fields, load_params, parse_params
from tasks.places import PROJECT_DIR

SHIPPED = sorted((PROJECT_DIR / "params").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_params_load_and_say_their_launch_line(path: Path) -> None:
    assert load_params(path).training.max_steps > 0
    header = path.read_text().split("\n\n")[0]
    assert f"--params params/{path.name}" in header


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_key_of_the_shipped_params_is_a_described_field(path: Path) -> None:
    described = dict(described_fields())
    for section, fields in yaml.safe_load(path.read_text()).items():
        for name in fields:
            assert described[f"{section}.{name}"].strip(), name


def test_the_help_says_what_becomes_of_a_rollout_chunk_that_does_not_divide_a_step() -> None:
    assert "the last may be fewer" in dict(described_fields())["training.rollout_batch_size"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("training.max_steps=2.5", "training.max_steps: must be a whole number, found 2.5"),
        ("training.gradient_checkpointing=perhaps", "training.gradient_checkpointing: must be true or false, found 'perhaps'"),
        ("training.max_steps=null", "training.max_steps: must be a whole number, found null"),
        ("base_model=3", "base_model: must be a mapping, found 3"),
        ("precision=null", "precision: must be a mapping, found null"),
        ("memory.retries=[3]", "memory.retries.0: must be a mapping, found 3"),
        ("memory.retries=3", "memory.retries: must be a list, found 3"),
        ("training.engine_args=3", "training.engine_args: must be a mapping, found 3"),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_in_plain_words(asked: str, told: str) -> None:
    with pytest.raises(RefusedInput, match=f"{re.escape(told)}$"):
        load_params(PROJECT_DIR / "params" / "retrain.yaml", (asked,))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.max_step=3", ("training.max_step: unknown key", "did you mean training.max_steps?")),
        ("trainning.max_steps=3", ("trainning: unknown key",)),
        ("training.max_steps=many", ("training.max_steps", "must be a whole number, found 'many'")),
        ("training.max_steps=true", ("training: max_steps takes a number", "not true or false")),
        ("training.max_steps=0", ("training.max_steps", "must be greater than or equal to 1, found 0", "retrain.yaml with training.max_")),
        ("training.learning_rate=.nan", ("training.learning_rate", "finite")),
        ("precision.mode=int8", ("precision.mode", "'auto', 'measured', 'bf16', 'fp16' or 'fp32'", "'int8'")),
        ("training.strategy=fsdp", ("training.strategy", "'single'", "'fsdp'")),
        ("training.strategy=ddp", ("training: strategy is 'ddp' and num_processes is 1", "num_processes of 2 or more")),
        ("training.num_processes=2", ("training: strategy is 'single' and num_processes is 2", "set strategy=ddp")),
        ("training.num_generations=7", ("whole groups", "32")),
        ("memory.retries=[{micro_batch_divisor: 3}]", ("memory.retries[0].micro_batch_divisor 3", "does not divide", "leave that entry's")),
        ("memory.retries=[{}, {precison: fp16}]", ("memory.retries.1.precison: unknown key; did you mean memory.retries.1.precision?",)),
        ("memory.retries=[{max_completion_length: 16}]", ("memory.retries[0].max_completion_length 16", "not below", "lower it")),
        ("memory.budget_mb=-5", ("memory.budget_mb", "greater than 0")),
        ("memory.budget_mb=1e300", ("memory.budget_mb", "less than or equal to", "found '1e300'")),
        ("memory.preflight=on", ("memory: preflight takes skip | warn | off, not true or false", "without quotes")),
        ("training.rollout_batch_size=64", ("rollout_batch_size 64 is above the 32 completions of a step", "lower it, or set it to null")),
        ("base_model.source=gpt5", ("base_model.source: must be one of 'smollm2-135m-instruct', 'scratch', found 'gpt5'",)),
        ("reward.scorer=nowhere.py:score", ("reward.scorer", "nowhere.py", "does not exist")),
        ("reward.scorer=sum", ("reward.scorer", "neither", "<file.py>:<function>")),
        ("no_equals_sign", ("section.key=value",)),
        ("training.max_steps.deep=1", ("training.max_steps",)),
    ],
)
def test_a_bad_value_is_refused_with_its_path(override: str, words: tuple[str, ...]) -> None:
    with pytest.raises(RefusedInput) as refused:
        load_params(PROJECT_DIR / "params" / "retrain.yaml", (override,))
    assert refused.value.exit_code == 2
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b\n", "mapping of sections, found list"),
        ("", "found NoneType"),
        ("a: [1\n", "not valid YAML"),
        ("training: {seed: 1}\ntraining: {seed: 2}\n", "key 'training' stands there twice"),
        ("!!python/name:os.system x", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_params_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(RefusedInput, match=words):
        load_params(path)


def test_a_missing_file_names_those_that_exist() -> None:
    with pytest.raises(RefusedInput, match=r"retrain\.yaml"):
        load_params(PROJECT_DIR / "params" / "retrian.yaml")


def test_all_faults_come_at_once() -> None:
    with pytest.raises(RefusedInput) as refused:
        parse_params({"training": {"max_steps": -1, "seed": "x"}, "bogus": 1}, "file")
    assert str(refused.value).count("\n") == 3


def test_overrides_and_dump_come_back_equal() -> None:
    params = load_params(PROJECT_DIR / "params" / "smoke.yaml", ("training.seed=7", "memory.budget_mb=12.5"))
    assert (params.training.seed, params.memory.budget_mb) == (7, 12.5)
    assert Params.model_validate(params.model_dump(mode="json")) == params


def test_every_field_has_a_description() -> None:
    assert len(described_fields()) == len(dict(described_fields()))
    assert all(not text.startswith("None") for _, text in described_fields())


def test_groups_must_be_whole_over_all_processes_together() -> None:
    training = {"strategy": "ddp", "num_processes": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    params = parse_params({"training": {**training, "num_generations": 8}, "memory": {"retries": []}}, "whole")
    assert (params.training.effective_batch_size, params.training.total_batch_size) == (4, 8)
    with pytest.raises(RefusedInput, match="x num_processes = 8 is no multiple of num_generations = 6"):
        parse_params({"training": {**training, "num_generations": 6}, "memory": {"retries": []}}, "broken")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize(("size", "smaller"), [(1, 1), (2, 1), (7, 1), (9, 3), (12, 6)])
def test_any_micro_batch_is_taken_and_the_default_retry_divides_it_where_it_can(path: Path, size: int, smaller: int) -> None:
    asked = (f"training.per_device_train_batch_size={size}", "training.gradient_accumulation_steps=8", "memory.retries=[{}]")
    params = load_params(path, asked)
    assert retry_levers(baseline_levers(params), params.memory.retries[0]).per_device_train_batch_size == smaller


def test_the_refusal_of_a_divisor_costs_no_other_retry() -> None:
    asked = ("training.per_device_train_batch_size=7", "training.gradient_accumulation_steps=8")
    with pytest.raises(RefusedInput, match=r"retries\[1\]\.micro_batch_divisor 2 does not divide") as refused:
        load_params(SHIPPED[0], (*asked, "memory.retries=[{precision: bf16}, {micro_batch_divisor: 2}]"))
    assert str(refused.value).count("memory.retries=") == 1, "what was asked, and no list in its place"
    load_params(SHIPPED[0], (*asked, "memory.retries=[{precision: bf16}, {}]"))


def test_a_section_without_its_source_is_refused_in_words() -> None:
    with pytest.raises(RefusedInput, match=r"base_model\.source: is missing beside hidden_size; see params/"):
        parse_params({"base_model": {"hidden_size": 64}}, "file")


@pytest.mark.parametrize(("section", "told"), [({1: 2}, "is missing beside 1; see params/"), ({}, "is missing; see params/")])
def test_a_section_without_its_source_is_refused_whatever_it_holds(section: dict[Any, Any], told: str) -> None:
    with pytest.raises(RefusedInput, match=rf"base_model\.source: {told}"):
        parse_params({"base_model": section}, "file")


def test_a_lever_that_changes_the_loss_is_refused_under_that_loss() -> None:
    shorter = "memory.retries=[{max_completion_length: 8}]"
    with pytest.raises(
        RefusedInput, match=r"retries\[0\]\.max_completion_length would change the loss: dr_grpo .*loss_type to dapo or grpo"
    ):
        load_params(SHIPPED[0], ("training.loss_type=dr_grpo", "training.max_completion_length=16", shorter))
    for loss in ("dapo", "grpo"):
        load_params(SHIPPED[0], (f"training.loss_type={loss}", "training.max_completion_length=16", shorter))


def test_preflight_off_needs_no_quotes() -> None:
    assert load_params(PROJECT_DIR / "params" / "retrain.yaml", ("memory.preflight=off",)).memory.preflight == "off"
