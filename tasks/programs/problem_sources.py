"""Draw a training and a held-out set that share no question."""

import random
import string
from collections.abc import Iterable
from dataclasses import dataclass

from tasks.errors import HalfstepError, RefusedInput
from tasks.params import BytePromptParams, DatasetParams, ReasoningGymParams
from tasks.programs.families import check_verifier, draw, entry_text
from tasks.programs.problems import Row

# reasoning-gym draws item i from seed + i: held-out seeds start this far behind the first training seed, or behind the last one
HELD_OUT_SEED_DISTANCE = 1_000_000
NUM_VERIFIED = 20


@dataclass(frozen=True)
class Drawn:
    """Two sets of problems, and what was left out of them."""

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    num_repeats: int = 0
    num_held_out_in_train: int = 0


def draw_sets(dataset: DatasetParams) -> Drawn:
    """Draw both sets as they come, repeats included.

    Raises:
        RefusedInput: reasoning-gym cannot do what is asked.
    """
    if isinstance(dataset, BytePromptParams):
        return _draw_byte_prompts(dataset)
    train = _draw_family(dataset, dataset.seed, dataset.num_train)
    held_out = _draw_family(dataset, dataset.seed + max(HELD_OUT_SEED_DISTANCE, dataset.num_train), dataset.num_eval)
    check_verifier(dataset, [row.entry for row in held_out[:NUM_VERIFIED]])
    return Drawn(train, held_out)


def separate(drawn: Drawn) -> Drawn:
    """Remove repeats within each set, and from the training set every question that is held out."""
    held_out, train = _distinct(drawn.held_out), _distinct(drawn.train)
    kept = {key: row for key, row in train.items() if key not in held_out}
    if kept.keys() & held_out.keys():
        raise HalfstepError("training and held-out problems overlap although they were separated; this is a fault of halfstep")
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


def _distinct(rows: Iterable[Row]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(normalised(row.question), row)
    return found


def _draw_family(dataset: ReasoningGymParams, seed: int, size: int) -> tuple[Row, ...]:
    entries = draw(dataset, seed, size)
    return tuple(
        Row(entry["question"], "" if entry["answer"] is None else str(entry["answer"]), entry_text(dataset, entry)) for entry in entries
    )


def _draw_byte_prompts(dataset: BytePromptParams) -> Drawn:
    stream = random.Random(dataset.seed)  # noqa: S311 (nothing secret)
    questions: dict[str, None] = {}
    while len(questions) < dataset.num_eval + dataset.num_train:
        words = ("".join(stream.choices(string.ascii_lowercase, k=stream.randint(2, 6))) for _ in range(stream.randint(2, 4)))
        questions.setdefault(" ".join(words))
    rows = tuple(Row(question, "", "{}") for question in questions)
    return Drawn(train=rows[dataset.num_eval :], held_out=rows[: dataset.num_eval])
