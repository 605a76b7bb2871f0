"""Small models and datasets for tests, made by the programs that make them for a run."""

import os
import subprocess
import sys
from pathlib import Path

from tasks.files import write_record
from tasks.params import BytePromptParams, ScratchModelParams
from tasks.places import PROJECT_DIR
from tasks.records import Record

SCRATCH = ScratchModelParams(source="scratch", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
BYTE_PROMPTS = BytePromptParams(source="byte_prompts", num_train=24, num_eval=12)


def run_module(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of ours as a person would."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **environment}
    return subprocess.run(command, cwd=PROJECT_DIR, env=environment, capture_output=True, text=True, check=False, timeout=300)


def build(module: str, request: Record, out_dir: Path) -> Path:
    """Have a program build a folder and return it."""
    path = out_dir.with_name(f"{out_dir.name}-request.json")
    write_record(path, request)
    done = run_module(module, str(path))
    assert done.returncode == 0, done.stderr
    return out_dir


def same_bytes(one: Path, other: Path) -> bool:
    """Tell whether two folders hold the same files with the same bytes."""
    files = [sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()) for folder in (one, other)]
    return files[0] == files[1] and all((one / name).read_bytes() == (other / name).read_bytes() for name in files[0])
