"""Problems: drawn from reasoning-gym or made of random bytes, separated into two sets, kept as parquet."""

import dataclasses
import difflib
import json
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from reasoning_gym.factory import DATASETS, create_dataset

from tasks.errors import RefusedInput
from tasks.params import BytePromptParams, DatasetParams, ReasoningGymParams

SCHEMA = pa.schema([(name, pa.string()) for name in ("prompt", "question", "answer", "entry")])
TRAIN_FILE = "train.parquet"
EVAL_FILE = "eval.parquet"
# reasoning-gym draws item i from seed + i: held-out seeds start this far behind the first training seed, or behind the last one
HELD_OUT_SEED_DISTANCE = 1_000_000
NUM_VERIFIED = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One problem. `entry` is the reasoning-gym entry as JSON, '{}' for other sources; `prompt` the whole text the model is fed."""

    question: str
    answer: str
    entry: str
    prompt: str = ""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Two sets of problems, and what was left out of them."""

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    num_repeats: int = 0
    num_held_out_in_train: int = 0


def write_problems(path: Path, problems: Sequence[Row]) -> None:
    """Write problems in one row group, with bytes that depend on nothing else."""
    table = pa.Table.from_pylist([dataclasses.asdict(problem) for problem in problems], SCHEMA)
    pq.write_table(table, path, row_group_size=len(problems), compression="zstd", store_schema=False)


def read_problems(path: Path) -> list[Row]:
    """Read the problems that `write_problems` wrote, in their order."""
    return [Row(**row) for row in pq.read_table(path).to_pylist()]


def draw_sets(dataset: DatasetParams) -> Drawn:
    """Draw both sets as they come, repeats included.

    Raises:
        RefusedInput: reasoning-gym cannot do what is asked.
    """
    if isinstance(dataset, BytePromptParams):
        return _draw_byte_prompts(dataset)
    held_out_seed = dataset.seed + max(HELD_OUT_SEED_DISTANCE, dataset.num_train)
    drawn = Drawn(draw(dataset, dataset.seed, dataset.num_train), draw(dataset, held_out_seed, dataset.num_eval))
    _check_verifier(dataset, drawn.held_out[:NUM_VERIFIED])
    return drawn


def separate(drawn: Drawn) -> Drawn:
    """Remove repeats within each set, and from the training set every question that is held out."""
    held_out, train = _distinct(drawn.held_out), _distinct(drawn.train)
    kept = {key: row for key, row in train.items() if key not in held_out}
    if not kept:
        raise RefusedInput(
            f"all {len(train)} distinct training problems are held out: the family has too few problems for these sizes; "
            "lower dataset.num_eval, or give the family wider dataset.options"
        )
    return Drawn(
        train=tuple(kept.values()),
        held_out=tuple(held_out.values()),
        num_repeats=len(drawn.train) - len(train) + len(drawn.held_out) - len(held_out),
        num_held_out_in_train=len(train) - len(kept),
    )


def normalised(question: str) -> str:
    """Return what makes two questions the same: their words, whatever the spacing and the case."""
    return " ".join(question.casefold().split())


def _distinct(rows: Sequence[Row]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(normalised(row.question), row)
    return found


def _draw_byte_prompts(dataset: BytePromptParams) -> Drawn:
    stream = random.Random(dataset.seed)  # noqa: S311 (nothing secret)
    questions: dict[str, None] = {}
    while len(questions) < dataset.num_eval + dataset.num_train:
        words = ("".join(stream.choices(string.ascii_lowercase, k=stream.randint(2, 6))) for _ in range(stream.randint(2, 4)))
        questions.setdefault(" ".join(words))
    rows = tuple(Row(question, "", "{}") for question in questions)
    return Drawn(train=rows[dataset.num_eval :], held_out=rows[: dataset.num_eval])


def open_family(params: ReasoningGymParams, seed: int = 0, size: int = 1) -> Any:
    """Return `size` problems of the family as reasoning-gym's dataset, item i drawn from ``seed + i``.

    Raises:
        RefusedInput: the family is unknown, or reasoning-gym does not take the options.
    """
    if params.family not in DATASETS:
        near = ", ".join(difflib.get_close_matches(params.family, DATASETS, n=3)) or "none"
        raise RefusedInput(f"dataset.family {params.family!r} is none of reasoning-gym's {len(DATASETS)} families; near names: {near}")
    known = {field.name for field in dataclasses.fields(DATASETS[params.family][1])} - {"seed", "size"}
    if foreign := sorted(params.options.keys() - known):
        raise RefusedInput(
            f"dataset.options.{foreign[0]} is no option of family {params.family!r}; known: {', '.join(sorted(known)) or 'none'} "
            "(dataset.seed, num_train and num_eval decide seed and size)"
        )
    try:
        return create_dataset(params.family, **params.options, seed=seed, size=size)
    except (AssertionError, ValueError, TypeError) as error:  # what the families' own checks raise
        raise RefusedInput(f"dataset.options {params.options} are refused by family {params.family!r}: {error}") from error


def draw(params: ReasoningGymParams, seed: int, size: int) -> tuple[Row, ...]:
    """Return the family's problems; a failure inside reasoning-gym is named with the item's seed."""
    family, rows = open_family(params, seed, size), []
    for index in range(size):
        try:
            entry = family[index]
            answer = "" if entry["answer"] is None else str(entry["answer"])
            rows.append(Row(entry["question"], answer, json.dumps(entry, sort_keys=True)))
        except Exception as error:  # a family may raise anything on options that its checks let pass, or make what JSON cannot hold
            where = f"family {params.family!r} with dataset.options {params.options}"
            raise RefusedInput(f"{where} raised {type(error).__name__} at seed {seed + index}: {error}") from error
    return tuple(rows)


def _check_verifier(params: ReasoningGymParams, rows: Sequence[Row]) -> None:
    verify = open_family(params).score_answer
    for entry in (json.loads(row.entry) for row in rows):
        # some families have no single answer; then there is nothing to try
        if isinstance(entry["answer"], str) and verify(answer=entry["answer"], entry=entry) < 1:
            raise RefusedInput(
                f"the verifier of family {params.family!r} gives its own answer {entry['answer'][:60]!r} "
                f"{verify(answer=entry['answer'], entry=entry)} instead of 1 once stored as JSON; choose another family"
            )
