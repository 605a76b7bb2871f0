"""Scorers: what a completion earns.

``reasoning_gym`` asks the verifier of the problem's own family, ``byte_share`` counts wanted characters, and
``<file.py>:<function>`` calls ``function(completions, questions, answers) -> list of floats`` of the file the user named.
Scores of a built-in scorer lie in [0, 1]; a user's own may be any finite number.
"""

import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from reasoning_gym.utils import extract_answer

from tasks.errors import RefusedInput, ScorerFailed
from tasks.params import DatasetParams, ReasoningGymParams, RewardParams
from tasks.programs.families import open_family
from tasks.programs.problems import Row


class Scorer(Protocol):
    """Score completions; completion i answers row i."""

    def __call__(self, completions: Sequence[str], rows: Sequence[Row]) -> list[float]:
        """Return one finite number a completion.

        Raises:
            ScorerFailed: the scorer raised or its result cannot be used; names the row and the reason.
        """
        ...


def load_scorer(params: RewardParams, dataset: DatasetParams) -> Scorer:
    """Return the scorer that `params` name.

    Raises:
        RefusedInput: the user's file cannot be imported or has no such function.
    """
    if params.scorer == "reasoning_gym":
        if not isinstance(dataset, ReasoningGymParams):
            raise RefusedInput(f"reward.scorer 'reasoning_gym' needs dataset.source 'reasoning_gym', found {dataset.source!r}")
        return _checked(_reasoning_gym(dataset), params.scorer)
    if params.scorer == "byte_share":
        return _checked(_byte_share(params.wanted_bytes), params.scorer)
    return _checked(_own_function(params.scorer), params.scorer)


def rehearse(scorer: Scorer, rows: Sequence[Row]) -> None:
    """Call the scorer on an empty and on the expected answer of each row, so that a faulty one fails before any work."""
    scorer([text for row in rows for text in ("", row.answer)], [row for row in rows for _ in range(2)])


def answer_text(completion: str) -> str:
    """Return what the completion gives as its answer: the content of its last <answer> tag, else all of it, stripped."""
    return extract_answer(completion) or completion.strip()


def _reasoning_gym(dataset: ReasoningGymParams) -> Scorer:
    verify: Callable[..., Any] = open_family(dataset, seed=0, size=1).score_answer

    def score(completions: Sequence[str], rows: Sequence[Row]) -> list[float]:
        pairs = zip(completions, rows, strict=True)
        scores = [verify(answer=answer_text(text), entry=json.loads(row.entry)) for text, row in pairs]
        return [min(1.0, max(0.0, float(value))) for value in scores]

    return score


def _byte_share(wanted_bytes: str) -> Scorer:
    wanted = frozenset(wanted_bytes)

    def score(completions: Sequence[str], rows: Sequence[Row]) -> list[float]:
        return [sum(character in wanted for character in text) / len(text) if text else 0.0 for text in completions]

    return score


def _own_function(scorer: str) -> Scorer:
    file, _, name = scorer.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"halfstep_scorer_{Path(file).stem}", file)
    if spec is None or spec.loader is None:
        raise RefusedInput(f"reward.scorer {scorer!r}: {file} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file may raise anything
        raise RefusedInput(f"reward.scorer {scorer!r}: importing {file} raised {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = ", ".join(sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))) or "none"
        raise RefusedInput(f"reward.scorer {scorer!r}: {file} has no function {name!r}; functions there: {found}")

    def score(completions: Sequence[str], rows: Sequence[Row]) -> list[float]:
        result: list[float] = function(list(completions), [row.question for row in rows], [row.answer for row in rows])
        return result

    return score


def _checked(scorer: Scorer, name: str) -> Scorer:
    def score(completions: Sequence[str], rows: Sequence[Row]) -> list[float]:
        if len(completions) != len(rows):
            raise ValueError(f"{len(completions)} completions for {len(rows)} rows")
        try:
            result: Any = scorer(completions, rows)
        except Exception as error:  # a scorer is the user's code: whatever it raises is named and kept as the cause
            where = _failing_row(scorer, completions, rows)
            raise ScorerFailed(f"reward.scorer {name!r} raised {type(error).__name__}: {error}{where}; mend the scorer") from error
        return _numbers(result, name, completions, rows)

    return score


def _failing_row(scorer: Scorer, completions: Sequence[str], rows: Sequence[Row]) -> str:
    for index, (text, row) in enumerate(zip(completions, rows, strict=True)):
        try:
            scorer([text], [row])
        except Exception as error:  # looking for the row that makes the scorer raise
            return f" (first at row {index}, {_shown(text, row)}: {type(error).__name__})"
    return " (on the batch; on no row alone)"


def _numbers(result: Any, name: str, completions: Sequence[str], rows: Sequence[Row]) -> list[float]:
    if isinstance(result, str | bytes) or not hasattr(result, "__len__") or not hasattr(result, "__iter__"):
        raise ScorerFailed(f"reward.scorer {name!r} must return a list of {len(rows)} numbers, found {type(result).__name__}")
    values = list(result)
    if len(values) != len(rows):
        first = min(len(values), len(rows))
        raise ScorerFailed(
            f"reward.scorer {name!r} must return one number a completion: asked for {len(rows)}, found {len(values)}; "
            f"wrong from row {first} on"
        )
    for index, value in enumerate(values):
        reason = _fault(value)
        if reason:
            raise ScorerFailed(f"reward.scorer {name!r}, row {index}: {reason}, {_shown(completions[index], rows[index])}; mend the scorer")
    return [float(value) for value in values]


def _fault(value: Any) -> str | None:
    if value is None:
        return "the score is None"
    if isinstance(value, str | bytes):
        return f"the score {value!r} is text, not a number"
    try:
        number = float(value)  # takes numpy and torch scalars too
    except (TypeError, ValueError):
        return f"the score {value!r} is a {type(value).__name__}, not a number"
    return None if math.isfinite(number) else f"the score is {number}"


def _shown(text: str, row: Row) -> str:
    return f"completion {text[:80]!r} for question {row.question[:80]!r}"
