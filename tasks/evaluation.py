"""Compare the tuned model with the base model on the held-out set, problem by problem."""

import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from pydantic import ValidationError

from tasks.errors import HalfstepError
from tasks.files import read_record, write_record
from tasks.params import BUILT_IN_SCORERS, Params
from tasks.places import STATE_DIR
from tasks.program_request import ANSWERS_FILE, EvaluationRequest, ModelAnswers, ScoredAnswer, ask_program
from tasks.records import Accuracy, ArtifactVersion, Evaluation, FinishedAttempt, RunSetting, SampledCompletion
from tasks.report import evaluation_text
from tasks.versioning.inputs import input_key

PROGRAM = "tasks.programs.evaluate"
# part of the key of kept base results: raise it when the evaluation program or a built-in scorer answers differently
FORMAT_VERSION = 1
Z_95 = 1.959963984540054


@task(cache_policy=NO_CACHE)
def evaluate(setting: RunSetting, params: Params, done: FinishedAttempt, checkpoint: ArtifactVersion) -> Evaluation:
    """Answer the held-out set with base and tuned model in the precision that trained, and compare.

    The base model's answers are kept under ``state/evaluations`` and used again while nothing they depend on has changed.
    """
    logger = get_run_logger()
    work_dir = setting.run.run_dir / "evaluation"
    base = _base_answers(setting, params, done, work_dir, logger.info)
    logger.info("evaluating the tuned model")
    tuned = _answers(_request(setting, params, done, checkpoint.path), work_dir / "tuned", logger.info)
    evaluation = compare(base, tuned, done.attempt.precision.label, params)
    logger.info("accuracy %s", evaluation_text(evaluation))
    return evaluation


def compare(base: ModelAnswers, tuned: ModelAnswers, precision: str, params: Params) -> Evaluation:
    """Compare two models' answers to the same problems."""
    if [answer.question for answer in base.answers] != [answer.question for answer in tuned.answers]:
        raise HalfstepError("base and tuned model answered different problems; delete state/evaluations and run again")
    pairs = list(zip(base.answers, tuned.answers, strict=True))
    threshold = params.evaluation.correct_threshold
    num_gained = sum(before.score < threshold <= after.score for before, after in pairs)
    num_lost = sum(after.score < threshold <= before.score for before, after in pairs)
    return Evaluation(
        precision=precision,
        base=accuracy(base.answers, threshold),
        tuned=accuracy(tuned.answers, threshold),
        num_gained=num_gained,
        num_lost=num_lost,
        p_value=exact_mcnemar(num_gained, num_lost),
        samples=tuple(
            SampledCompletion(
                prompt=before.question,
                expected=before.expected,
                before=before.completion,
                after=after.completion,
                score_before=before.score,
                score_after=after.score,
            )
            for before, after in (pairs[index] for index in spread(len(pairs), params.evaluation.num_samples))
        ),
    )


def accuracy(answers: tuple[ScoredAnswer, ...], threshold: float) -> Accuracy:
    """Return the share of answers that score at least `threshold`, with its interval."""
    num_correct = sum(answer.score >= threshold for answer in answers)
    low, high = wilson_interval(num_correct, len(answers))
    return Accuracy(
        num_correct=num_correct,
        num_problems=len(answers),
        share=num_correct / len(answers),
        low=low,
        high=high,
        mean_score=math.fsum(answer.score for answer in answers) / len(answers),
    )


def wilson_interval(num_correct: int, num_problems: int) -> tuple[float, float]:
    """Return the 95 % interval of a share. Source: Wilson, JASA 22 (1927) 209."""
    share, z2 = num_correct / num_problems, Z_95**2
    centre = share + z2 / (2 * num_problems)
    half = Z_95 * math.sqrt(share * (1 - share) / num_problems + z2 / (4 * num_problems**2))
    scale = 1 + z2 / num_problems
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def exact_mcnemar(num_gained: int, num_lost: int) -> float:
    """Return the two-sided p-value of gains against losses under a fair coin. Source: McNemar, Psychometrika 12 (1947) 153."""
    num_changed = num_gained + num_lost
    tail = sum(math.comb(num_changed, k) for k in range(min(num_gained, num_lost) + 1))
    return min(1.0, 2 * tail / (1 << num_changed))


def spread(num_problems: int, num_samples: int) -> list[int]:
    """Return indices spread evenly over the problems, the same in every run."""
    count = min(num_samples, num_problems)
    return [index * num_problems // count for index in range(count)]


def _request(setting: RunSetting, params: Params, done: FinishedAttempt, model_dir: Path) -> EvaluationRequest:
    return EvaluationRequest(
        model_dir=model_dir.resolve(),
        dataset_dir=setting.dataset.version.path.resolve(),
        dataset=params.dataset,
        reward=params.reward,
        precision=done.attempt.precision,
        batch_size=params.evaluation.batch_size,
        max_new_tokens=params.training.max_completion_length,
    )


def _answers(request: EvaluationRequest, work_dir: Path, say: Callable[[str], None]) -> ModelAnswers:
    ask_program(PROGRAM, request, work_dir, say)
    return read_record(work_dir / ANSWERS_FILE, ModelAnswers)


def _base_answers(setting: RunSetting, params: Params, done: FinishedAttempt, work_dir: Path, say: Callable[[str], None]) -> ModelAnswers:
    request = _request(setting, params, done, setting.base_model.path)
    kept = _kept_path(setting, request)
    if kept is not None and kept.is_file():
        try:
            answers = read_record(kept, ModelAnswers)
            say(f"base model: answers of an earlier run with the same model, data and settings are used ({kept.name})")
            return answers
        except ValidationError:
            say(f"{kept} cannot be read and is made anew")
    say("evaluating the base model")
    answers = _answers(request, work_dir / "base", say)
    if kept is not None:
        write_record(kept, answers)
    return answers


def _kept_path(setting: RunSetting, request: EvaluationRequest) -> Path | None:
    # a scorer of the user's own may depend on anything, so its results are never used again
    if request.reward.scorer not in BUILT_IN_SCORERS:
        return None
    asked = request.model_dump(mode="json", exclude={"model_dir", "dataset_dir"})
    facts = {
        "format_version": FORMAT_VERSION,
        "base_model": setting.base_model.dvc_hash,
        "dataset": setting.dataset.version.dvc_hash,
        "device": setting.hardware.device_name,
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
    return STATE_DIR / "evaluations" / f"{input_key(asked | facts)}.json"
