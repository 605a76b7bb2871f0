"""Steps of several attempts as one curve; the line that says how far training is."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks.progress import TrainingProgress, draw_curves, duration, joined_steps, lost_steps, progress_line
from tasks.records import FinishedAttempt, Outcome
from tests.test_next_attempt import plan


def finished(folder: Path, steps: range, reward: float) -> FinishedAttempt:
    folder.mkdir()
    metrics = {"reward": reward, "grad_norm": 1.0, "step_time_ms": 2000.0, "peak_memory_mb": 100.0}
    lines = [json.dumps({"step": step, "time": step + 1000 * reward, "metrics": metrics}) for step in steps]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n" + '{"step": 99, "ti')
    return FinishedAttempt(attempt=plan().attempts[0], outcome=Outcome(status="out_of_memory"), attempt_dir=folder)


def test_a_later_attempt_replaces_what_came_after_its_state(tmp_path: Path) -> None:
    first, second = finished(tmp_path / "a", range(1, 15), 0.1), finished(tmp_path / "b", range(11, 21), 0.9)
    steps = joined_steps((first, second))
    assert [step["step"] for step in steps] == list(range(1, 21))
    assert [step["reward"] for step in steps] == [0.1] * 10 + [0.9] * 10
    assert [(step["step"], step["reward"]) for step in lost_steps((first, second))] == [(step, 0.1) for step in range(11, 15)]
    assert lost_steps((first,)) == []
    assert draw_curves((first, second), "a run", tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_progress_tells_the_time_left_and_the_last_step(tmp_path: Path) -> None:
    said: list[str] = []
    finished(tmp_path / "a", range(1, 4), 0.5)
    progress = TrainingProgress(tmp_path / "a", 0, 3, said.append)
    progress.update()
    progress.update()
    assert len(said) == 1
    assert "step 3/3" in said[0]
    assert "left" not in said[0]
    step = {"step": 4.0, "reward": 0.25, "step_time_ms": 30000.0, "peak_memory_mb": 812.4, "loss_scale": 65536.0}
    line = progress_line([step], 10, datetime(2030, 1, 1, 23, 59, tzinfo=UTC))
    assert line == "step 4/10  reward 0.250  loss scale 65536  30.0 s a step  peak 812 MB  3 min left (until 00:02)"


def test_g2_completions_that_are_all_cut_are_said_while_the_run_goes_on_and_once(tmp_path: Path) -> None:
    said: list[str] = []
    metrics = {"reward": 0.5, "step_time_ms": 100.0, "peak_memory_mb": 1.0, "completions/clipped_ratio": 1.0}
    progress = TrainingProgress(tmp_path, 0, 3, said.append)
    for number in (1, 2):
        with (tmp_path / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": number, "time": 0.0, "metrics": metrics}) + "\n")
        progress.update(final=True)
    assert [line.partition(" (")[0] for line in said if "warning" in line] == [
        "warning, step 1, clipped_completions: every completion was cut at training.max_completion_length, so none was rewarded for its end"
    ]
    assert "step 2/3" in said[-1]


@pytest.mark.parametrize(("seconds", "text"), [(40, "40 s"), (420, "7 min"), (7500, "2 h 05 min")])
def test_durations_are_said_as_people_do(seconds: int, text: str) -> None:
    assert duration(timedelta(seconds=seconds)) == text
