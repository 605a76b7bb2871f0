"""Scorers, and what happens to one that misbehaves (cases G3, G5)."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tasks.errors import RefusedInput, ScorerFailed
from tasks.params import BytePromptParams, ReasoningGymParams, RewardParams
from tasks.places import PROJECT_DIR
from tasks.programs.problems import Row
from tasks.programs.rewards import answer_text, load_scorer, rehearse

BYTES = BytePromptParams(source="byte_prompts")
TWELVE = Row("What is 5 + 7?", "12", json.dumps({"answer": "12"}))


# as in a child program, which hides mlflow from trl
HIDDEN = """
import sys
sys.orig_argv.append("tasks.programs.train")
from tasks.params import BytePromptParams, RewardParams
from tasks.programs.rewards import load_scorer
print(sys.modules["mlflow"])
load_scorer(RewardParams(scorer=sys.argv[1]), BytePromptParams(source="byte_prompts"))
print(sys.modules["mlflow"].__name__)
"""


def test_a_scorer_may_import_what_the_programs_hide_from_trl(tmp_path: Path) -> None:
    (tmp_path / "mlflow.py").write_text("")
    path = tmp_path / "own.py"
    path.write_text("import mlflow\ndef score(completions, questions, answers):\n    return [1.0]\n")
    environment = {**os.environ, "PYTHONPATH": f"{PROJECT_DIR}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-c", HIDDEN, f"{path}:score"]
    done = subprocess.run(command, cwd=PROJECT_DIR, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["None", "mlflow"], done.stderr


def own_scorer(folder: Path, body: str, name: str = "score") -> RewardParams:
    path = folder / "own.py"
    path.write_text(f"def score(completions, questions, answers):\n    {body}\n")
    return RewardParams(scorer=f"{path}:{name}")


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("12", 1.0),
        (" 12.\n", 1.0),
        ("+12.0", 1.0),
        ("It is <answer> 12 </answer>, surely", 1.0),
        ("112", 2 / 3),  # reasoning-gym's own partial credit: the share of the text that is the answer
        ("The answer is 12", 2 / 16),
        ("13", 0.0),
        ("", 0.0),
        (" \n", 0.0),
        ("sNaN", 0.0),
    ],
)
def test_reasoning_gym_scores_with_the_verifier_of_the_family(completion: str, score: float) -> None:
    scorer = load_scorer(RewardParams(), ReasoningGymParams())
    assert scorer([completion], [TWELVE]) == [pytest.approx(score)]


def test_the_last_answer_tag_counts() -> None:
    assert answer_text("<answer>1</answer> no, <answer>2</answer>") == "2"


@pytest.mark.parametrize(("completion", "share"), [("abcd", 0.5), ("xyz", 0.0), ("", 0.0), ("ab", 1.0), ("aé", 0.5)])
def test_byte_share_is_the_share_of_wanted_characters(completion: str, share: float) -> None:
    scorer = load_scorer(RewardParams(scorer="byte_share", wanted_bytes="ab"), BYTES)
    assert scorer([completion], [TWELVE]) == [share]


def test_an_own_function_gets_completions_questions_and_answers(tmp_path: Path) -> None:
    params = own_scorer(tmp_path, "return [float(c == a) + 10 * len(q) for c, q, a in zip(completions, questions, answers)]")
    assert load_scorer(params, BYTES)(["12", "13"], [TWELVE, TWELVE]) == [141.0, 140.0]


def test_numbers_of_other_libraries_are_numbers(tmp_path: Path) -> None:
    params = own_scorer(tmp_path, "import numpy; return numpy.array([0.5, 1], dtype=numpy.float32)")
    scores = load_scorer(params, BYTES)(["a", "b"], [TWELVE, TWELVE])
    assert scores == [0.5, 1.0] and not any(isinstance(score, np.generic) for score in scores)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return [1.0, None]", r"row 1: the score None is a NoneType, not a number.*'b'.*What is 5 \+ 7"),
        ("return [float('nan'), 1.0]", "row 0: the score is nan.*'a'"),
        ("return [1.0, float('inf')]", "row 1: the score is inf"),
        ("return [1.0, 'good']", "row 1: the score 'good' is a str, not a number"),
        ("return [1.0, [2.0]]", r"row 1: the score \[2.0\] is a list, not a number"),
        ("return [1.0]", "asked for 2, found 1; wrong from row 1 on"),
        ("return [1.0, 2.0, 3.0]", "asked for 2, found 3; wrong from row 2 on"),
        ("return 1.0", "a list of 2 numbers, found float"),
        ("return (c for c in completions)", "a list of 2 numbers, found generator"),
        ("return [1 / (len(c) - (c == 'b')) for c in completions]", "raised ZeroDivisionError.*first at row 1, completion 'b'"),
        ("assert len(completions) == 1; return [1.0]", "raised AssertionError.*on no row alone"),
    ],
)
def test_a_faulty_scorer_is_named_with_the_row_and_the_reason(tmp_path: Path, body: str, reason: str) -> None:
    scorer = load_scorer(own_scorer(tmp_path, body), BYTES)
    with pytest.raises(ScorerFailed, match=reason):
        scorer(["a", "b"], [TWELVE, TWELVE])


def test_what_a_scorer_raised_is_kept_as_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ScorerFailed) as caught:
        load_scorer(own_scorer(tmp_path, "raise KeyError('gold')"), BYTES)(["a"], [TWELVE])
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("body", ["return [1 / len(c) for c in completions]", "return [math.nan for c in completions]"])
def test_a_rehearsal_finds_a_faulty_scorer_before_any_work(tmp_path: Path, body: str) -> None:
    with pytest.raises(ScorerFailed):
        rehearse(load_scorer(own_scorer(tmp_path, body), BYTES), [TWELVE])


def test_a_file_without_the_function_is_refused_with_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(RefusedInput, match="no function 'scores'; functions there: score"):
        load_scorer(own_scorer(tmp_path, "return []", name="scores"), BYTES)


def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import a_module_that_is_not_there\n")
    with pytest.raises(RefusedInput, match="ModuleNotFoundError: No module named 'a_module_that_is_not_there'"):
        load_scorer(RewardParams(scorer=f"{tmp_path / 'own.py'}:score"), BYTES)


def test_built_in_scores_stay_between_zero_and_one() -> None:
    scorer = load_scorer(RewardParams(), ReasoningGymParams())
    scores = scorer(["12" * n for n in range(20)], [TWELVE] * 20)
    assert all(0 <= score <= 1 and math.isfinite(score) for score in scores)
