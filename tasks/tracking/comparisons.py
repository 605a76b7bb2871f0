"""A comparison in MLflow: its runs' measures beside the curves of each child, tables, plots and the verdict on the parent."""

import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, urlencode

from tasks.comparison_measures import ComparisonRecord, run_values, variant_means
from tasks.comparison_report import plain
from tasks.records import TrackedRun
from tasks.tracking.entities import log_values
from tasks.tracking.location import reaching
from tasks.tracking.runs import log_rows, open_attempt_run


def log_comparison(run: TrackedRun, record: ComparisonRecord, files: Sequence[Path]) -> None:
    """Log everything the report shows and close the run; `files` and folders are kept as they are.

    A measure of one run is `measured/<name>` on its child, the mean over a variant's seeds `<variant>/<name>` on the parent. The
    parent's description has the verdict and links to the views of MLflow that set its runs side by side.
    """
    children = []
    measured = {(item.variant, item.seed): item for item in record.measured.runs}
    verdict = record.measured.verdict
    for done in record.attempts:
        child = open_attempt_run(run, done.attempt)
        item = measured[done.attempt.variant, done.attempt.seed or 0]
        with reaching(run.tracking_uri, f"log the measures of {done.attempt.name!r}") as client:
            values = {f"measured/{name}": value for name, value in run_values(item).items()}
            log_values(client, child.run_id, {"outcome.what_happened": item.what_happened or None}, values)
        children.append(child.run_id)
    said = " ".join(verdict.sentences)
    tags = {
        "verdict": said,
        "verdict.indicative": verdict.indicative,
        "verdict.best": verdict.best_overall,
        "verdict.only_finished": verdict.only_finished,
    }
    for finding in verdict.findings:
        tags |= {f"verdict.{finding.criterion}": finding.sentence}
        tags |= {f"verdict.{finding.criterion}.measure": finding.decides.measure} if finding.decides else {}
    tags["mlflow.note.content"] = f"{plain(said)}\n\n{_views(run, children)}"
    rows = [item.model_dump(exclude={"measures", "correct", "base_correct"}) | run_values(item) for item in record.measured.runs]
    columns = dict.fromkeys(name for row in rows for name in row)
    contrasts = [contrast.model_dump() for finding in verdict.findings for contrast in finding.contrasts]
    succeeded = any(item.status == "succeeded" for item in record.measured.runs)
    with reaching(run.tracking_uri, "log the comparison and close its run") as client:
        log_values(client, run.run_id, tags, _metrics(record))
        log_rows(client, run.run_id, [{name: row.get(name) for name in columns} for row in rows], "runs.json")
        log_rows(client, run.run_id, contrasts, "contrasts.json")
        client.log_text(run.run_id, record.model_dump_json(indent=2), "comparison.json")
        for path in files:
            client.log_artifact(run.run_id, str(path))
        client.set_terminated(run.run_id, "FINISHED" if succeeded else "FAILED")


def _views(run: TrackedRun, children: Sequence[str]) -> str:
    """Return Markdown links to MLflow's views of some runs; its list of runs alone hides them under their parent."""
    which = {"runs": json.dumps(children, separators=(",", ":")), "experiments": json.dumps([run.experiment_id])}
    reward = {"metric": '"reward"', "plot_metric_keys": '["reward"]', "x_axis": "step"}
    order = {"orderByKey": "tags.`mlflow.runName`", "orderByAsc": "true"}
    charts = {"compareRunsMode": "CHART", "searchFilter": f"tags.`mlflow.parentRunId` = '{run.run_id}'", **order}
    views = {
        "curves of the reward": ("metric", which | reward),
        "every curve": (f"experiments/{run.experiment_id}/runs", charts),
        "measures side by side": ("compare-runs", which),
    }
    return "\n".join(f"- [{name}](#/{path}?{urlencode(asked, quote_via=quote)})" for name, (path, asked) in views.items())


def _metrics(record: ComparisonRecord) -> dict[str, float | None]:
    rows = {f"{variant}/{name}": value for variant, its in variant_means(record.measured.runs).items() for name, value in its.items()}
    found: dict[str, float | None] = {**rows, "wall_seconds": record.wall_seconds, "training_seconds": record.training_seconds}
    for one in record.measured.serving:
        shares = {"": one.accuracy.share, "_low": one.accuracy.low, "_high": one.accuracy.high} if one.accuracy else {}
        found |= {f"serving/{one.precision}/accuracy{end}": value for end, value in shares.items()}
        found[f"serving/{one.precision}/decode_time_ms"] = one.decode_time_ms
    for finding in record.measured.verdict.findings:
        decides = finding.decides.model_dump(include={"effect", "low", "high", "p_value"}) if finding.decides else {}
        found |= {f"verdict/{finding.criterion}/{name}": value for name, value in decides.items()}
    return found
