"""What a person meets: help, the plan, and one message for bad input before any work."""

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from tasks.command_line import main
from tasks.places import PROJECT_DIR, as_found

SMOKE = ("--params", "params/smoke.yaml")


def never(**parameters: object) -> NoReturn:
    raise AssertionError(f"work was started with {parameters}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*SMOKE, "training.max_step=3"), "training.max_step: unknown key"),
        ((*SMOKE, "training.max_steps=many"), "found 'many'"),
        ((*SMOKE, "precision.mode=int4"), "precision.mode"),
        (("--params", "params/none.yaml"), "does not exist"),
        (("--params", "README.md"), "README.md"),
        (("--resume", "no-such-run"), "there is no such run"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(never, list(arguments)) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_a_contradiction_with_the_hardware_is_refused_by_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(never, [*SMOKE, "--plan", "precision.mode=fp16", "precision.grad_scaler=false"]) == 2
    assert "grad_scaler" in capsys.readouterr().err
    assert main(never, [*SMOKE, "--plan", "training.engine_args={max_steps: 3}"]) == 2
    assert "training.engine_args.max_steps: decided by training.max_steps" in capsys.readouterr().err
    assert main(never, [*SMOKE, "--plan", "training.engine_args={top_q: 0.5}"]) == 2
    assert "training.engine_args.top_q: trl.GRPOConfig has no such argument; nearest: top_p" in capsys.readouterr().err


def test_plan_shows_hardware_attempts_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(never, [*SMOKE, "--plan"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("hardware", "bf16", "fp16", "MB free", "plan", "1-baseline-", "2-retry-", "micro-batch 64 -> 32", "not "):
        assert words in shown, words
    for words in ("objective 'stability' (bf16 first where native", "weights are stored in float32", "After a divergence: stop"):
        assert words in shown, words
    assert main(never, [*SMOKE, "--plan", "precision.on_divergence=next", "precision.mode=bf16", "precision.objective=speed"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("the mode overrules precision.objective 'speed'", "-fallback-fp32", "After a divergence in"):
        assert words in shown, words


def test_help_teaches_as_a_real_process() -> None:
    done = subprocess.run([sys.executable, "-m", "flows.retrain", "--help"], cwd=PROJECT_DIR, capture_output=True, text=True, check=True)
    for words in ("--plan", "--resume", "examples:", "exit codes:", "training.max_steps", "memory.retries[0].precision"):
        assert words in done.stdout, words


def test_a_message_names_a_run_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT_DIR)
    assert as_found(PROJECT_DIR / "runs" / "mine") == "runs/mine"
    assert as_found(Path("/elsewhere/runs/mine")) == "/elsewhere/runs/mine"
