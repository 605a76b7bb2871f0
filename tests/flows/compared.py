"""What holds for every comparison, whatever it found: each of its figures is in MLflow."""

import json

import pytest
from mlflow import artifacts
from mlflow.entities import Run

from tasks.comparison_measures import run_values, variant_means
from tests.flow_runs import FlowRun


def runs_by_name(run: FlowRun) -> dict[str, Run]:
    """Return the child runs of a comparison."""
    parent = run.client.get_run(run.comparison.tracked.run_id)
    found = run.client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    return {child.info.run_name: child for child in found}


def every_figure_is_in_mlflow(compared: FlowRun) -> None:
    """Check the measures of runs and variants, the served checkpoint, the verdict's findings and each of its contrasts."""
    record, its = compared.comparison, runs_by_name(compared)
    parent = compared.client.get_run(record.tracked.run_id)
    for run in record.measured.runs:
        child = its[f"{run.variant}-seed{run.seed}"]
        assert (child.data.tags["variant"], child.data.tags["seed"]) == (run.variant, str(run.seed))
        assert child.data.tags.get("outcome.what_happened", "") == run.what_happened
        for name, value in run_values(run).items():
            assert child.data.metrics[f"measured/{name}"] == value, name
    for variant, means in variant_means(record.measured.runs).items():
        for name, value in means.items():
            assert parent.data.metrics[f"{variant}/{name}"] == value, name
    for served in record.measured.serving:
        assert served.accuracy is not None and served.decode_time_ms is not None and served.decode_time_ms > 0
        assert parent.data.metrics[f"serving/{served.precision}/accuracy"] == served.accuracy.share
        assert parent.data.metrics[f"serving/{served.precision}/decode_time_ms"] == served.decode_time_ms
    assert parent.data.metrics["training_seconds"] == record.training_seconds
    verdict = record.measured.verdict
    assert parent.data.tags["verdict"] == " ".join(verdict.sentences)
    for finding in verdict.findings:
        assert parent.data.tags[f"verdict.{finding.criterion}"] == finding.sentence
        assert parent.data.tags.get(f"verdict.{finding.criterion}.measure") == (finding.decides and finding.decides.measure)
        for name in ("effect", "low", "high", "p_value"):
            assert parent.data.metrics.get(f"verdict/{finding.criterion}/{name}") == (finding.decides and getattr(finding.decides, name))
    names = {item.path for item in compared.client.list_artifacts(record.tracked.run_id)}
    assert {"report.html", "report.md", "comparison.json", "runs.json", "curves", "summary.txt"} <= names
    contrasts = [contrast.model_dump() for finding in verdict.findings for contrast in finding.contrasts]
    if contrasts:
        table = json.loads(artifacts.load_text(f"{parent.info.artifact_uri}/contrasts.json"))
        # pandas writes ten digits
        expected = [
            [pytest.approx(value, rel=1e-6, abs=1e-9) if isinstance(value, float) else value for value in row.values()] for row in contrasts
        ]
        assert (table["columns"], table["data"]) == (list(contrasts[0]), expected)
    description = parent.data.tags["mlflow.note.content"]
    assert all(child.info.run_id in description for child in its.values())
