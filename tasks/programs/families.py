"""reasoning-gym's families of problems: opened by name, with every refusal as one message."""

import dataclasses
import difflib
import json
from collections.abc import Iterator
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset

from tasks.errors import RefusedInput
from tasks.params import ReasoningGymParams

# the family draws item i from seed + i, so a range of seeds is a set of items
Entry = dict[str, Any]


def open_family(params: ReasoningGymParams, seed: int, size: int) -> Any:
    """Return `size` problems of the family as reasoning-gym's dataset, item i drawn from ``seed + i``.

    Raises:
        RefusedInput: the family is unknown, or reasoning-gym does not take the options.
    """
    if params.family not in DATASETS:
        near = ", ".join(difflib.get_close_matches(params.family, DATASETS, n=3)) or "none"
        raise RefusedInput(f"dataset.family {params.family!r} is none of reasoning-gym's {len(DATASETS)} families; near names: {near}")
    _check_names(params)
    try:
        return create_dataset(params.family, **params.options, seed=seed, size=size)
    except (AssertionError, ValueError, TypeError) as error:  # what the families' own checks raise
        raise RefusedInput(f"dataset.options {params.options} are refused by family {params.family!r}: {error}") from error


def draw(params: ReasoningGymParams, seed: int, size: int) -> Iterator[Entry]:
    """Yield the family's entries; a failure inside reasoning-gym is named with the item's seed."""
    family = open_family(params, seed, size)
    for index in range(size):
        try:
            yield family[index]
        except Exception as error:  # a family may raise anything on options that its checks let pass
            where = f"family {params.family!r} with dataset.options {params.options}"
            raise RefusedInput(f"{where} raised {type(error).__name__} at seed {seed + index}: {error}") from error


def entry_text(params: ReasoningGymParams, entry: Entry) -> str:
    """Return an entry as JSON, from which its verifier must still accept the entry's own answer."""
    try:
        return json.dumps(entry, sort_keys=True)
    except TypeError as error:
        raise RefusedInput(f"problems of family {params.family!r} cannot be stored as JSON ({error}); choose another family") from error


def check_verifier(params: ReasoningGymParams, texts: list[str]) -> None:
    """Refuse a family whose verifier does not accept its own answers once the entries went through JSON."""
    verify = open_family(params, 0, 1).score_answer
    for text in texts:
        entry = json.loads(text)
        # some families have no single answer; then there is nothing to try
        if isinstance(entry["answer"], str) and verify(answer=entry["answer"], entry=entry) < 1:
            raise RefusedInput(
                f"the verifier of family {params.family!r} gives its own answer {entry['answer'][:60]!r} "
                f"{verify(answer=entry['answer'], entry=entry)} instead of 1 once stored as JSON; choose another family"
            )


def _check_names(params: ReasoningGymParams) -> None:
    known = {field.name for field in dataclasses.fields(DATASETS[params.family][1])} - {"seed", "size"}
    for name in params.options:
        if name in ("seed", "size"):
            raise RefusedInput(f"dataset.options.{name} is decided by dataset.seed, dataset.num_train and dataset.num_eval; remove it")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise RefusedInput(
                f"dataset.options.{name} is no option of family {params.family!r}; {hint}known: {', '.join(sorted(known)) or 'none'}"
            )
