"""What a resume may set otherwise, and what it refuses."""

from pathlib import Path

import pytest
import yaml

from tasks import run_folder
from tasks.errors import RefusedInput
from tasks.files import write_record
from tasks.params import Params, load_params
from tasks.places import PROJECT_DIR
from tasks.records import RunFolder, SourceVersion
from tasks.request import resolve_params

SMOKE = PROJECT_DIR / "params" / "smoke.yaml"


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """Two runs that ended early, of the one flow and of the other, with the params of smoke.yaml."""
    monkeypatch.setattr(run_folder, "RUNS_DIR", tmp_path)
    params = load_params(SMOKE)
    for flow in ("retrain", "compare"):
        source = SourceVersion(git_commit=None, dirty=None)
        folder = RunFolder(name=flow, run_dir=tmp_path / flow, started_at="now", flow_run_id=None, flow=flow, source=source)
        folder.run_dir.mkdir()
        write_record(folder.run_dir / "run_folder.json", folder)
        (folder.run_dir / "params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))
    return params


def test_a_resume_may_set_memory_and_levers_and_keeps_all_else(runs: Params) -> None:
    assert resolve_params(str(SMOKE), resume="retrain") == runs
    asked = ["memory.retries=[]", "memory.preflight=warn", "training.per_device_train_batch_size=8", "training.compact_allocator=true"]
    asked += ["training.gradient_accumulation_steps=8", "training.rollout_batch_size=16", "training.optimizer_8bit=true"]
    resolved = resolve_params(str(SMOKE), resume="retrain", memory_budget_mb=900, overrides=[*asked, "training.seed=42"])
    assert (resolved.memory.budget_mb, resolved.memory.retries) == (900, ())
    assert resolved.training.per_device_train_batch_size == 8 and resolved.training.optimizer_8bit
    same = {"training": runs.training, "memory": runs.memory}
    assert resolved.model_copy(update=same) == runs


@pytest.mark.parametrize(
    ("flow", "override", "words"),
    [
        ("retrain", "training.seed=1", "training.seed 42 -> 1; what may be set on a resume is memory.* and training.gradient_accumulation"),
        ("retrain", "training.lora_rank=8", "training.lora_rank None -> 8"),
        ("retrain", "precision.mode=fp32", "precision.mode auto -> fp32"),
        ("retrain", "training.gradient_accumulation_steps=2", "per_device_train_batch_size x gradient_accumulation_steps 64 -> 128"),
        ("retrain", "memory.budget_mb=-1", "memory.budget_mb"),
        ("compare", "memory.budget_mb=900", "memory.budget_mb None -> 900.0; leave it out, or start a new run"),
    ],
)
def test_what_changes_the_task_or_the_loss_is_refused_on_a_resume(flow: str, override: str, words: str) -> None:
    with pytest.raises(RefusedInput) as refused:
        resolve_params(str(SMOKE), resume=flow, overrides=[override], flow=flow)
    assert words in str(refused.value)
