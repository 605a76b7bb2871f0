"""Measure the runs of a comparison and evaluate their checkpoints; one of them in every format, as it would be served."""

from pathlib import Path
from statistics import fmean
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from pydantic import Field

from tasks.attempt_files import read_steps
from tasks.comparison import last_starts, run_order
from tasks.comparison_records import MeasuredRun, Verdict
from tasks.evaluation import accuracy, answer_each, base_request, evaluation_request
from tasks.files import read_record
from tasks.measures import correct_answers, run_measures
from tasks.objectives import LABELS, Label, fact, possible
from tasks.params import Params
from tasks.program_request import EvaluationRequest, ModelAnswers
from tasks.records import Accuracy, FinishedAttempt, Hardware, Precision, PrecisionPlan, Record, RunSetting
from tasks.verdict import judge

DEVICE_PEAK = "peak_memory_mb_device_"


class ServedFormat(Record):
    """One checkpoint, answering the held-out set in one format."""

    precision: str
    accuracy: Accuracy | None = None
    decode_time_ms: float | None = Field(default=None, description="a token, for a batch of evaluation.batch_size; median")
    what_happened: str = ""


class Measured(Record):
    """What the runs of a comparison came to."""

    runs: tuple[MeasuredRun, ...] = Field(description="in their order, with those that failed or were refused")
    served: str = Field(default="", description="the run whose checkpoint is served; empty: none succeeded")
    serving: tuple[ServedFormat, ...] = ()
    verdict: Verdict


class ComparisonRecord(RunSetting):
    """A whole comparison, written to ``comparison.json`` and logged to MLflow."""

    params: dict[str, Any]
    attempts: tuple[FinishedAttempt, ...] = Field(description="the last start of each run")
    measured: Measured
    wall_seconds: float | None = Field(description="of the flow's process up to the report; null: the comparison was interrupted")
    training_seconds: float = Field(description="sum over the training processes")
    versions: dict[str, str] = Field(description="of the libraries that train")


@task(cache_policy=NO_CACHE)
def measure(setting: RunSetting, params: Params, finished: tuple[FinishedAttempt, ...]) -> Measured:
    """Evaluate the checkpoints in the precision that trained them, measure every run, and judge.

    Answers that are there are not given again: the base model's of an earlier run, this comparison's own of an earlier start.
    """
    folder = (setting.run.run_dir / "evaluation").resolve()
    ends = last_starts(finished)
    own: dict[str, EvaluationRequest] = {}
    base: dict[str, EvaluationRequest] = {}
    served: dict[str, EvaluationRequest] = {}
    for done in ends:
        name, precision, checkpoint = done.attempt.name, done.attempt.precision, done.outcome.checkpoint_dir
        if done.outcome.status == "succeeded" and checkpoint:
            own[name] = evaluation_request(setting, params, precision, checkpoint, folder / f"{name}.json")
            base[name] = base_request(setting, params, precision, folder / f"base-{precision.label}.json")
            served = served or _served_requests(setting.hardware, own[name])
    faults = answer_each([*base.values(), *own.values(), *served.values()], folder, get_run_logger().info)
    runs = [_refused(*place, number, setting.plan) for number, place in enumerate(run_order(params.comparison), 1)]
    for done in ends:
        name = done.attempt.name
        runs[done.attempt.number - 1] = _measured(done, params, own.get(name), base.get(name), faults)
    serving = tuple(_served(label, setting, params, served.get(label), faults) for label in LABELS) if own else ()
    return Measured(runs=tuple(runs), served=next(iter(own), ""), serving=serving, verdict=judge(tuple(runs)))


def variant_means(runs: tuple[MeasuredRun, ...]) -> dict[str, dict[str, float]]:
    """Return each variant's measures: means over the seeds that succeeded, of lowest_loss_scale the least, of mismatch_max the largest."""
    found: dict[str, dict[str, list[float]]] = {run.variant: {} for run in runs}
    for run in runs:
        for name, value in run_values(run).items():
            found[run.variant].setdefault(name, []).append(value)
    over = {"lowest_loss_scale": min, "mismatch_max": max}
    return {variant: {name: over.get(name, fmean)(values) for name, values in its.items()} for variant, its in found.items()}


def run_values(run: MeasuredRun) -> dict[str, float]:
    """Return the measures of one run that have a value; none of a run that failed."""
    if run.measures is None:
        return {}
    known = run.measures.model_dump(exclude={"peak_memory_mb_by_device", "accuracy"})
    if its := run.measures.accuracy:
        known |= {"accuracy": its.share, "accuracy_low": its.low, "accuracy_high": its.high, "num_problems": its.num_problems}
    known |= {f"{DEVICE_PEAK}{at}": peak for at, peak in enumerate(run.measures.peak_memory_mb_by_device)}
    return {name: float(value) for name, value in known.items() if value is not None}


def _served_requests(hardware: Hardware, own: EvaluationRequest) -> dict[str, EvaluationRequest]:
    """Return a checkpoint's requests in each format; in the one that trained it that is its `own` evaluation."""
    requests: dict[str, EvaluationRequest] = {own.precision.label: own}
    for label in LABELS:
        if label not in requests and possible(label, hardware, rehearse=True):
            precision = Precision(mixed_precision="no" if label == "fp32" else label, grad_scaler=label == "fp16")
            out_file = own.out_file.with_name(f"serving-{label}.json")
            requests[label] = own.model_copy(update={"precision": precision, "out_file": out_file})
    return requests


def _measured(
    done: FinishedAttempt, params: Params, own: EvaluationRequest | None, base: EvaluationRequest | None, faults: dict[Path, str]
) -> MeasuredRun:
    attempt, outcome, threshold = done.attempt, done.outcome, params.evaluation.correct_threshold
    succeeded = outcome.status == "succeeded"
    happened = ["" if succeeded else outcome.ending, outcome.failure.message if outcome.failure else ""]
    answers, base_answers = (read_record(it.out_file, ModelAnswers) if it and it.out_file not in faults else None for it in (own, base))
    happened += [f"not evaluated: {faults[it.out_file]}" for it in (own, base) if it and it.out_file in faults]
    share = accuracy(answers.answers, threshold) if answers else None
    return MeasuredRun(
        variant=attempt.variant,
        seed=attempt.seed or 0,
        order=attempt.number,
        status=outcome.status,
        measures=run_measures(read_steps(done.attempt_dir), params.comparison.warmup_steps, outcome, share) if succeeded else None,
        what_happened=": ".join(part for part in happened if part),
        correct=correct_answers(answers, threshold) if answers else (),
        base_correct=correct_answers(base_answers, threshold) if answers and base_answers else (),
    )


def _refused(variant: str, seed: int, number: int, plan: PrecisionPlan) -> MeasuredRun:
    reason = next((item.reason for item in plan.ruled_out if item.precision == variant), "it was not made")
    return MeasuredRun(variant=variant, seed=seed, order=number, status="failed", refused=True, what_happened=f"refused: {reason}")


def _served(label: Label, setting: RunSetting, params: Params, asked: EvaluationRequest | None, faults: dict[Path, str]) -> ServedFormat:
    if asked is None:
        return ServedFormat(precision=label, what_happened=f"refused: {fact(label, setting.hardware)}")
    if asked.out_file in faults:
        return ServedFormat(precision=label, what_happened=faults[asked.out_file])
    answers = read_record(asked.out_file, ModelAnswers)
    share = accuracy(answers.answers, params.evaluation.correct_threshold)
    return ServedFormat(precision=label, accuracy=share, decode_time_ms=answers.decode_time_ms)
