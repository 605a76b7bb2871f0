"""A comparison as the run folder, MLflow and Prefect keep it."""

import shutil
import time

import psutil
from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.attempt_log import deliver
from tasks.comparison import last_starts, library_versions
from tasks.comparison_measures import ComparisonRecord, Measured, variant_means
from tasks.comparison_report import figures, page, report_text, shown, time_text, with_images
from tasks.errors import HalfstepError
from tasks.files import write_aside, write_record
from tasks.params import Params
from tasks.places import RUNS_DIR, as_found
from tasks.records import FinishedAttempt, RunSetting
from tasks.run_folder import COMPARISON_FILE
from tasks.run_log import NETWORK_RETRIES
from tasks.tracking.comparisons import log_comparison

# no curves are drawn of runs without a step
LOGGED = ("report.html", "report.md", "summary.txt", "curves")
SUMMARY_MEASURES = {"reward": "reward", "accuracy": "accuracy", "step_time_ms": "ms a step", "peak_memory_mb": "MB at the peak"}


@task(cache_policy=NO_CACHE, retries=NETWORK_RETRIES, retry_delay_seconds=5)
def conclude_comparison(setting: RunSetting, params: Params, finished: tuple[FinishedAttempt, ...], measured: Measured) -> ComparisonRecord:
    """Write and log the report of a comparison; the checkpoints are not kept beyond it.

    Raises:
        HalfstepError: MLflow is away; the comparison can be gone on with, which logs it.
    """
    seconds = sum(done.outcome.process_seconds or 0.0 for done in finished)
    interrupted = any(done.in_earlier_start for done in finished)
    record = ComparisonRecord(
        **dict(setting),
        params=params.model_dump(mode="json"),
        attempts=last_starts(finished),
        measured=measured,
        wall_seconds=None if interrupted else time.time() - psutil.Process().create_time(),
        training_seconds=seconds,
        versions=library_versions(),
    )
    run_dir, drawn = setting.run.run_dir, figures(record)
    text = report_text(record, drawn)
    write_aside(run_dir / "report.md", text)
    for name, svg in drawn.items():
        write_aside(run_dir / "curves" / f"{name}.svg", svg)
    write_aside(run_dir / "report.html", page(text, drawn, record.run_name))
    write_aside(run_dir / "summary.txt", summary_text(record) + "\n")
    try:
        for done in finished:
            deliver(setting.tracked, done, get_run_logger().warning)
        log_comparison(setting.tracked, record, [path for name in LOGGED if (path := run_dir / name).exists()])
    except HalfstepError as error:
        later = f"python -m flows.compare --resume {record.run_name}"
        raise HalfstepError(f"{error}\nThe comparison itself is done, see {as_found(run_dir)}/report.html; log it with: {later}") from error
    create_markdown_artifact(with_images(text, drawn), key="comparison", description=f"Comparison {record.run_name}")
    for done in finished:
        shutil.rmtree(done.attempt_dir / "checkpoint", ignore_errors=True)
    # last: a comparison without it can be resumed
    write_record(run_dir / COMPARISON_FILE, record)
    return record


def summary_text(record: ComparisonRecord) -> str:
    """Return the end of a comparison in a dozen lines: verdict, figures, what failed, times, where it is."""
    runs = record.measured.runs
    num_succeeded = sum(run.status == "succeeded" for run in runs)
    lines = [f"halfstep comparison {record.run_name}: {num_succeeded} of {len(runs)} runs succeeded"]
    lines += [f"  verdict     {sentence}" for sentence in record.measured.verdict.sentences]
    for variant, its in variant_means(runs).items():
        parts = [f"{label} {shown(its[name])}" for name, label in SUMMARY_MEASURES.items() if name in its]
        lines.append(f"  {variant:<11} {', '.join(parts) or 'no run succeeded'}")
    lines += [
        f"  {'not' if run.status != 'succeeded' else 'warning':<11} {run.variant}, seed {run.seed}: {run.what_happened[:300]}"
        for run in runs
        if run.what_happened
    ]
    lines.append(f"  time        {time_text(record)}")
    lines.append(f"  look at     {as_found(RUNS_DIR / record.run_name)}/report.html, and make ui, run {record.tracked.run_id}")
    return "\n".join(lines)
