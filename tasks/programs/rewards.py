"""Scorers: what a completion earns.

``reasoning_gym`` asks the verifier of the problem's own family, ``byte_share`` counts wanted characters, and
``<file.py>:<function>`` calls ``function(completions, questions, answers) -> list of floats`` of the file the user named.
Scores of a built-in scorer lie in [0, 1]; a user's own may be any finite number.
"""

import json
import math
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

from reasoning_gym.utils import extract_answer

from tasks.errors import RefusedInput, ScorerFailed
from tasks.params import DatasetParams, ReasoningGymParams, RewardParams
from tasks.programs.problems import Row, open_family

# scores completions, of which number i answers row i
Scorer = Callable[[Sequence[str], Sequence[Row]], list[float]]


def load_scorer(params: RewardParams, dataset: DatasetParams) -> Scorer:
    """Return the scorer that `params` name; it gives one finite number a completion, or raises ScorerFailed with row and reason.

    Raises:
        RefusedInput: the user's file cannot be imported or has no such function.
    """
    if params.scorer == "reasoning_gym":
        if not isinstance(dataset, ReasoningGymParams):
            raise RefusedInput(f"reward.scorer 'reasoning_gym' needs dataset.source 'reasoning_gym', found {dataset.source!r}")
        scorer = _reasoning_gym(dataset)
    elif params.scorer == "byte_share":
        scorer = _byte_share(params.wanted_bytes)
    else:
        scorer = _own_function(params.scorer)
    return _checked(scorer, params.scorer)


def rehearse(scorer: Scorer, rows: Sequence[Row]) -> None:
    """Call the scorer on an empty and on the expected answer of each row, so that a faulty one fails before any work."""
    scorer([text for row in rows for text in ("", row.answer)], [row for row in rows for _ in range(2)])


def answer_text(completion: str) -> str:
    """Return what the completion gives as its answer: the content of its last <answer> tag, else all of it, stripped."""
    return extract_answer(completion) or completion.strip()


def _reasoning_gym(dataset: ReasoningGymParams) -> Scorer:
    verify: Callable[..., Any] = open_family(dataset).score_answer

    def score(completions: Sequence[str], rows: Sequence[Row]) -> list[float]:
        pairs = zip(completions, rows, strict=True)
        scores = [verify(answer=answer_text(text), entry=json.loads(row.entry)) for text, row in pairs]
        return [min(1.0, max(0.0, float(value))) for value in scores]

    return score


def _byte_share(wanted: str) -> Scorer:
    return lambda completions, rows: [sum(character in wanted for character in text) / len(text) if text else 0.0 for text in completions]


def _own_function(scorer: str) -> Scorer:
    file, _, name = scorer.rpartition(":")
    if sys.modules.get("mlflow", True) is None:
        # hidden from trl (see this package); what the user's file imports is its own affair
        del sys.modules["mlflow"]
    try:
        found = runpy.run_path(file)
    except Exception as error:  # the user's file may raise anything
        raise RefusedInput(f"reward.scorer {scorer!r}: importing {file} raised {type(error).__name__}: {error}") from error
    function = found.get(name)
    if not callable(function):
        known = ", ".join(sorted(key for key, value in found.items() if callable(value) and not key.startswith("_"))) or "none"
        raise RefusedInput(f"reward.scorer {scorer!r}: {file} has no function {name!r}; functions there: {known}")
    return lambda completions, rows: function(list(completions), [row.question for row in rows], [row.answer for row in rows])


def _checked(scorer: Scorer, name: str) -> Scorer:
    def score(completions: Sequence[str], rows: Sequence[Row]) -> list[float]:
        try:
            result: Any = scorer(completions, rows)
        except Exception as error:  # a scorer is the user's code: whatever it raises is named and kept as the cause
            where = _failing_row(scorer, completions, rows)
            raise ScorerFailed(f"reward.scorer {name!r} raised {type(error).__name__}: {error}{where}; mend the scorer") from error
        if isinstance(result, str | bytes) or not hasattr(result, "__len__") or not hasattr(result, "__iter__"):
            raise ScorerFailed(f"reward.scorer {name!r} must return a list of {len(rows)} numbers, found {type(result).__name__}")
        values = list(result)
        if len(values) != len(rows):
            raise ScorerFailed(
                f"reward.scorer {name!r} must return one number a completion: asked for {len(rows)}, found {len(values)}; "
                f"wrong from row {min(len(values), len(rows))} on"
            )
        for index, (value, text, row) in enumerate(zip(values, completions, rows, strict=True)):
            if fault := _fault(value):
                raise ScorerFailed(f"reward.scorer {name!r}, row {index}: the score {fault}, {_shown(text, row)}; mend the scorer")
        return [float(value) for value in values]

    return score


def _failing_row(scorer: Scorer, completions: Sequence[str], rows: Sequence[Row]) -> str:
    for index, (text, row) in enumerate(zip(completions, rows, strict=True)):
        try:
            scorer([text], [row])
        except Exception as error:  # looking for the row that makes the scorer raise
            return f" (first at row {index}, {_shown(text, row)}: {type(error).__name__})"
    return " (on the batch; on no row alone)"


def _fault(value: Any) -> str | None:
    try:
        # takes numpy and torch scalars too
        number = None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None:
        return f"{value!r} is a {type(value).__name__}, not a number"
    return None if math.isfinite(number) else f"is {number}"


def _shown(text: str, row: Row) -> str:
    return f"completion {text[:80]!r} for question {row.question[:80]!r}"
