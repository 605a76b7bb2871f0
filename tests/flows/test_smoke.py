"""The whole pipeline on a tiny model: what it trained, what it logged, and what comes back from the store."""

import hashlib
import subprocess
import sys
from pathlib import Path

from scipy.stats import mannwhitneyu

from tasks.attempt_files import read_steps
from tests.flow_runs import ROOT, STEP_METRICS, FlowRun

LOADS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], local_files_only=True)
ids = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)("abc", return_tensors="pt")
assert torch.isfinite(model(**ids).logits).all()
"""


def test_one_bf16_attempt_that_learned(smoke_run: FlowRun) -> None:
    assert smoke_run.returncode == 0, smoke_run.stderr[-3000:]
    (done,) = smoke_run.record.attempts
    observed = done.outcome.observed
    assert observed is not None
    assert (observed.forward, observed.backward, observed.rollout) == (("bfloat16",), ("bfloat16",), ("bfloat16",))
    assert observed.trainable_weights == ("float32",)
    assert not observed.scaler_live
    assert done.outcome.weights_changed
    assert done.outcome.steps_done == done.outcome.total_steps == 30
    steps = read_steps(done.attempt_dir)
    assert all(step["grad_norm"] > 0 for step in steps)
    rewards = [step["reward"] for step in steps]
    assert mannwhitneyu(rewards[-8:], rewards[:8], alternative="greater").pvalue < 0.001


def test_summary_says_what_came_out(smoke_run: FlowRun) -> None:
    for words in (
        "succeeded",
        "observed in forward bfloat16, backward bfloat16, rollout bfloat16",
        "because",
        "reward",
        "accuracy",
        "p = ",
        "peak",
        "tokens/s",
        "restore",
        "make ui",
    ):
        assert words in smoke_run.stdout, words
    assert "Traceback" not in smoke_run.stderr
    assert "left (until" in smoke_run.stderr, "no progress line with the time left"


def test_mlflow_holds_the_run(smoke_run: FlowRun) -> None:
    record, parent = smoke_run.record, smoke_run.parent()
    (child,) = smoke_run.children()
    assert (parent.info.status, child.info.status) == ("FINISHED", "FINISHED")
    assert parent.data.params["training.max_steps"] == "30"
    assert record.checkpoint is not None
    assert parent.data.tags["checkpoint.dvc_hash"] == record.checkpoint.dvc_hash
    assert parent.data.tags["plan.reason"] == record.plan.reason
    assert parent.data.tags["git.commit"] == str(record.run.source.git_commit)
    assert parent.inputs.dataset_inputs[0].dataset.digest == record.dataset.version.dvc_hash[:8]
    assert record.evaluation is not None
    assert parent.data.metrics["accuracy_tuned"] == record.evaluation.tuned.share
    names = {item.path for item in smoke_run.client.list_artifacts(parent.info.run_id)}
    assert {"run.json", "params.yaml", "hardware.json", "plan.json", "curves.png", "summary.txt", "samples.json"} <= names


def test_every_step_reached_mlflow_once(smoke_run: FlowRun) -> None:
    (child,) = smoke_run.children()
    written = read_steps(smoke_run.record.attempts[0].attempt_dir)
    assert set(written[0]) >= STEP_METRICS
    for name in STEP_METRICS:
        history = sorted(smoke_run.client.get_metric_history(child.info.run_id, name), key=lambda point: point.step)
        if name == "peak_memory_mb":  # the outcome's figure is logged beside the curve
            history = [point for point in history if point.value in {step[name] for step in written}][:30]
        assert [point.step for point in history] == list(range(1, 31)), name
        assert [point.value for point in history] == [step[name] for step in written], name


def test_evaluation_is_paired_and_shows_samples(smoke_run: FlowRun) -> None:
    evaluation = smoke_run.record.evaluation
    assert evaluation is not None
    assert evaluation.tuned.num_correct - evaluation.base.num_correct == evaluation.num_gained - evaluation.num_lost
    assert evaluation.tuned.low <= evaluation.tuned.share <= evaluation.tuned.high
    assert len(evaluation.samples) == 5
    assert any(sample.before != sample.after for sample in evaluation.samples)


def test_checkpoint_comes_back_bit_for_bit_and_loads(smoke_run: FlowRun, flow_environment: dict[str, str], tmp_path: Path) -> None:
    checkpoint = smoke_run.record.checkpoint
    assert checkpoint is not None
    target = tmp_path / "restored"
    command = [sys.executable, "-m", "tasks.versioning", "restore", checkpoint.dvc_hash, str(target)]
    subprocess.run(command, cwd=ROOT, env=flow_environment, check=True, capture_output=True)
    assert _digests(target) == _digests(checkpoint.path)
    subprocess.run([sys.executable, "-c", LOADS, str(target)], check=True, capture_output=True, env=flow_environment)


def _digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}
