"""Compare the tuned model with the base model on the held-out set, problem by problem."""

import math
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from scipy.stats import binomtest

from tasks.errors import HalfstepError
from tasks.files import read_record
from tasks.params import BUILT_IN_SCORERS, Params
from tasks.places import STATE_DIR
from tasks.program_request import EvaluationBatch, EvaluationRequest, ModelAnswers, ScoredAnswer, ask_program
from tasks.records import Accuracy, ArtifactVersion, Evaluation, FinishedAttempt, Precision, RunSetting, SampledCompletion
from tasks.report import evaluation_text
from tasks.versioning.inputs import input_key

# part of the key of kept base results: raise it when ModelAnswers changes, or the evaluation program or a built-in scorer answers
# differently
FORMAT_VERSION = 3


@task(cache_policy=NO_CACHE)
def evaluate(setting: RunSetting, params: Params, done: FinishedAttempt, checkpoint: ArtifactVersion) -> Evaluation:
    """Answer the held-out set with base and tuned model in the precision that trained, and compare.

    The base model's answers are kept under ``state/evaluations`` and used again while nothing they depend on has changed.
    """
    logger, work_dir = get_run_logger(), setting.run.run_dir.resolve() / "evaluation"
    of_base = base_request(setting, params, done.attempt.precision, work_dir / "base.json")
    of_tuned = evaluation_request(setting, params, done.attempt.precision, checkpoint.path, work_dir / "tuned.json")
    if faults := answer_each((of_base, of_tuned), work_dir, logger.info):
        raise HalfstepError("\n".join(faults.values()))
    base, tuned = (read_record(request.out_file, ModelAnswers) for request in (of_base, of_tuned))
    evaluation = compare(base, tuned, params)
    logger.info("accuracy %s", evaluation_text(evaluation))
    return evaluation


def compare(base: ModelAnswers, tuned: ModelAnswers, params: Params) -> Evaluation:
    """Compare two models' answers to the same problems."""
    if [answer.question for answer in base.answers] != [answer.question for answer in tuned.answers]:
        raise HalfstepError("base and tuned model answered different problems; delete state/evaluations and run again")
    pairs = list(zip(base.answers, tuned.answers, strict=True))
    threshold = params.evaluation.correct_threshold
    num_gained = sum(before.score < threshold <= after.score for before, after in pairs)
    num_lost = sum(after.score < threshold <= before.score for before, after in pairs)
    return Evaluation(
        base=accuracy(base.answers, threshold),
        tuned=accuracy(tuned.answers, threshold),
        num_gained=num_gained,
        num_lost=num_lost,
        p_value=mcnemar(num_gained, num_lost),
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


def mcnemar(num_gained: int, num_lost: int) -> float:
    """Return the two-sided p of McNemar's exact test: gains against losses under a fair coin."""
    return float(binomtest(num_gained, num_gained + num_lost).pvalue) if num_gained + num_lost else 1.0


def accuracy(answers: tuple[ScoredAnswer, ...], threshold: float) -> Accuracy:
    """Return the share of answers that score at least `threshold`, with its interval."""
    num_correct = sum(answer.score >= threshold for answer in answers)
    interval = binomtest(num_correct, len(answers)).proportion_ci(method="wilson")
    return Accuracy(
        num_correct=num_correct,
        num_problems=len(answers),
        share=num_correct / len(answers),
        low=float(interval.low),
        high=float(interval.high),
        mean_score=math.fsum(answer.score for answer in answers) / len(answers),
    )


def spread(num_problems: int, num_samples: int) -> list[int]:
    """Return indices spread evenly over the problems, the same in every run."""
    count = min(num_samples, num_problems)
    return [index * num_problems // count for index in range(count)]


def evaluation_request(setting: RunSetting, params: Params, precision: Precision, model_dir: Path, out_file: Path) -> EvaluationRequest:
    """Return the request to answer the held-out set with one model in the format that trained, as it would be served.

    An fp32 head and a rollout's own dtype are no part of it: they belong to training, and no checkpoint tells its server of them.
    """
    return EvaluationRequest(
        model_dir=model_dir.resolve(),
        dataset_dir=setting.dataset.version.path.resolve(),
        out_file=out_file.resolve(),
        precision=precision.model_copy(update={"lm_head_fp32": False, "rollout_dtype": None}),
        params=params,
    )


def answer_each(requests: Iterable[EvaluationRequest], work_dir: Path, say: Callable[[str], None]) -> dict[Path, str]:
    """Answer every request whose file is missing, all in one process, and again alone what that leaves over.

    Returns what kept a file from being written, by file.
    """
    missing = {request.out_file: request for request in requests if not request.out_file.is_file()}
    together = [tuple(missing.values())] if len(missing) > 1 else []
    faults: dict[Path, str] = {}
    for batch in [*together, *((request,) for request in missing.values())]:
        left = tuple(request for request in batch if not request.out_file.is_file())
        try:
            if left:
                say(f"evaluating {', '.join(request.out_file.stem for request in left)}")
                ask_program("tasks.programs.evaluate", EvaluationBatch(requests=left), work_dir, say)
        except HalfstepError as error:
            faults |= {request.out_file: str(error) for request in left}
    return {path: fault for path, fault in faults.items() if not path.is_file()}


def base_request(setting: RunSetting, params: Params, precision: Precision, out_file: Path) -> EvaluationRequest:
    """Return the request of the base model's answers, which are kept for later runs; in `out_file` if they may depend on anything."""
    request = evaluation_request(setting, params, precision, setting.base_model.path, out_file)
    # as those of a scorer of the user's own do
    if params.reward.scorer not in BUILT_IN_SCORERS:
        return request
    asked = params.evaluation.model_dump(include={"batch_size", "temperature"})
    asked |= params.model_dump(mode="json", include={"dataset", "reward"})
    facts: dict[str, object] = {library: version(library) for library in ("torch", "transformers")}
    facts |= {"precision": request.precision.model_dump(mode="json"), "max_new_tokens": params.training.max_completion_length}
    facts |= {"base_model": setting.base_model.dvc_hash, "dataset": setting.dataset.version.dvc_hash}
    facts |= {"device": setting.hardware.device_name, "format_version": FORMAT_VERSION}
    return request.model_copy(update={"out_file": STATE_DIR / "evaluations" / f"base-{input_key(asked | facts)}.json"})
