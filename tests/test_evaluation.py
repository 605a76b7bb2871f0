"""The comparison of base and tuned model: statistics against published values, and the step with real child processes."""

from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from tasks import evaluation
from tasks.errors import HalfstepError
from tasks.evaluation import accuracy, compare, evaluate, spread
from tasks.files import read_record
from tasks.params import Params
from tasks.program_request import REQUEST_FILE, EvaluationBatch, ModelAnswers, ScoredAnswer
from tasks.records import (
    ArtifactVersion,
    Attempt,
    DatasetVersion,
    FinishedAttempt,
    MemoryLevers,
    Outcome,
    Precision,
    PrecisionPlan,
    RunFolder,
    RunSetting,
    SourceVersion,
    TrackedRun,
)
from tests.builds import BYTE_PROMPTS, SCRATCH
from tests.machines import hardware_of

BF16 = Precision(mixed_precision="bf16", grad_scaler=False)
PARAMS = Params.model_validate(
    {
        "base_model": SCRATCH.model_dump(),
        "dataset": BYTE_PROMPTS.model_dump(),
        "reward": {"scorer": "byte_share"},
        "training": {"max_completion_length": 4},
        "evaluation": {"correct_threshold": 0.1, "num_samples": 3},
    }
)


# Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3
@pytest.mark.parametrize(
    ("correct", "of", "low", "high"), [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]
)
def test_the_interval_of_a_share_agrees_with_the_published_table(correct: int, of: int, low: float, high: float) -> None:
    found = accuracy(answers(*[1.0] * correct, *[0.0] * (of - correct)).answers, 1.0)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("gained", "lost", "p_value"), [(0, 0, 1.0), (5, 5, 1.0), (1, 0, 1.0), (0, 3, 0.25), (4, 1, 0.375)])
def test_gains_against_losses_are_those_of_a_fair_coin(gained: int, lost: int, p_value: float) -> None:
    before, after = [0.0] * gained + [1.0] * lost + [1.0], [1.0] * gained + [0.0] * lost + [1.0]
    assert compare(answers(*before), answers(*after), PARAMS).p_value == pytest.approx(p_value)


def test_samples_are_spread_over_the_problems() -> None:
    assert spread(178, 5) == [0, 35, 71, 106, 142]
    assert (spread(2, 5), spread(5, 0)) == ([0, 1], [])


def answers(*scores: float) -> ModelAnswers:
    scored = tuple(
        ScoredAnswer(question=f"question {index}", expected="7", completion=f"{score}", score=score) for index, score in enumerate(scores)
    )
    return ModelAnswers(answers=scored)


def test_models_are_compared_problem_by_problem() -> None:
    found = compare(answers(1.0, 0.0, 0.05, 0.3), answers(0.0, 1.0, 0.1, 0.4), PARAMS)
    assert (found.base.num_correct, found.tuned.num_correct, found.num_gained, found.num_lost) == (2, 3, 2, 1)
    assert (found.base.share, found.base.mean_score) == (0.5, pytest.approx(0.3375))
    assert found.p_value == 1.0
    assert [(sample.prompt, sample.before, sample.after) for sample in found.samples] == [
        ("question 0", "1.0", "0.0"),
        ("question 1", "0.0", "1.0"),
        ("question 2", "0.05", "0.1"),
    ]


def test_answers_to_different_problems_are_not_compared() -> None:
    with pytest.raises(HalfstepError, match="different problems"):
        compare(answers(1.0, 0.0), answers(1.0), PARAMS)


def version(path: Path, dvc_hash: str) -> ArtifactVersion:
    return ArtifactVersion(path=path, dvc_hash=dvc_hash, size_bytes=1, location="store:x")


def a_run(run_dir: Path, model_dir: Path, dataset_dir: Path, precision: Precision = BF16) -> tuple[RunSetting, FinishedAttempt]:
    levers = MemoryLevers(per_device_train_batch_size=8, gradient_accumulation_steps=4, gradient_checkpointing=False)
    attempt = Attempt(number=1, label="baseline", precision=precision, levers=levers, engine="trl_local", reason="a test")
    source = SourceVersion(git_commit=None, dirty=None)
    setting = RunSetting(
        run=RunFolder(name=run_dir.name, run_dir=run_dir, started_at="now", flow_run_id=None, source=source),
        tracked=TrackedRun(tracking_uri="none", experiment_id="0", run_id="0"),
        hardware=hardware_of("tesla_t4"),
        plan=PrecisionPlan(attempts=(attempt,), reason="a test"),
        base_model=version(model_dir, "0.dir"),
        dataset=DatasetVersion(version=version(dataset_dir, "1.dir"), num_train=24, num_eval=12, num_dropped=0),
    )
    done = FinishedAttempt(
        attempt=attempt, outcome=Outcome(status="succeeded", checkpoint_dir=model_dir), attempt_dir=run_dir / attempt.name
    )
    return setting, done


def test_base_answers_are_kept_and_used_again(
    tmp_path: Path, scratch_model_dir: Path, byte_dataset_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "STATE_DIR", tmp_path / "state")
    for name, num_asked in (("first", 2), ("second", 1)):
        setting, done = a_run(tmp_path / name, scratch_model_dir, byte_dataset_dir)
        with disable_run_logger():
            found = evaluate.fn(setting, PARAMS, done, version(scratch_model_dir, "0.dir"))
        assert found.base.num_problems == 12 and found.p_value == 1.0 and found.base == found.tuned
        requests = read_record(tmp_path / name / "evaluation" / REQUEST_FILE, EvaluationBatch).requests
        assert len(requests) == num_asked
        assert all(request.precision == BF16 and request.params.training.max_completion_length == 4 for request in requests)


def test_kept_answers_stand_for_everything_they_depend_on(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")
    setting, done = a_run(tmp_path, tmp_path / "model", tmp_path / "data")
    fp16, head = (
        a_run(tmp_path, tmp_path / "model", tmp_path / "data", precision)
        for precision in (Precision(mixed_precision="fp16", grad_scaler=True), BF16.model_copy(update={"lm_head_fp32": True}))
    )
    longer = PARAMS.model_copy(update={"training": PARAMS.training.model_copy(update={"max_completion_length": 5})})
    own = PARAMS.model_copy(update={"reward": PARAMS.reward.model_copy(update={"scorer": f"{tmp_path / 'own.py'}:score"})})
    moved = setting.model_copy(update={"base_model": version(tmp_path / "elsewhere", "0.dir")})
    other = setting.model_copy(update={"base_model": version(tmp_path / "model", "2.dir")})

    def kept(setting: RunSetting, params: Params, done: FinishedAttempt) -> Path:
        return evaluation.base_request(setting, params, done.attempt.precision, tmp_path / "asked.json").out_file

    first = kept(setting, PARAMS, done)
    assert first == kept(moved, PARAMS, done)
    assert len({first, kept(other, PARAMS, done), kept(setting, longer, done), kept(setting, PARAMS, fp16[1])}) == 4
    assert tmp_path / "asked.json" == kept(setting, own, done) != first
    # how the head computed in training is no part of the answers, so that variants share them
    assert kept(setting, PARAMS, head[1]) == first
