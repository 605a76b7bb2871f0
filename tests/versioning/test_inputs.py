"""Finding built inputs, in a small real git and DVC project with two stages."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.errors import HalfstepError
from tasks.versioning.folders import folder_hash, object_path, read_folder
from tasks.versioning.inputs import find_input, input_key
from tasks.versioning.restore import cache_dir, restore_folder
from tasks.versioning.store import run_dvc, store_folder

SPEC = {"source": "reasoning_gym", "family": "chain_sum", "options": {"max": 2}}
BUILD = """import json, pathlib, sys
folder = pathlib.Path(sys.argv[1]); folder.mkdir(parents=True)
(folder / "manifest.json").write_text(json.dumps({"spec": json.loads(sys.argv[2]), "num": 3}))
(folder / "train.parquet").write_bytes(b"rows" * 1000)
"""


def shell(project: Path, *command: str) -> str:
    return subprocess.run(command, cwd=project, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("built")
    shell(project, "git", "init", "-q")
    run_dvc(project, "init", "--quiet")
    (project / "build.py").write_text(BUILD)
    (project / ".gitignore").write_text("state/\n")
    outputs = {"dataset": ("data/datasets/chain_sum", SPEC), "base_model": ("data/base_models/small", {"source": "small"})}
    stages = {
        stage: {"cmd": f"{sys.executable} build.py {path} '{json.dumps(spec)}'", "deps": ["build.py"], "outs": [path]}
        for stage, (path, spec) in outputs.items()
    }
    (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    for path, _ in outputs.values():
        (project / path).parent.mkdir(parents=True)
    run_dvc(project, "repro", "--quiet")
    shell(project, "git", "add", "-A")
    shell(project, "git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "built")
    return project


@pytest.fixture
def project(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "project"))


def test_stage_output_is_found_by_spec_and_hash(project: Path) -> None:
    found = find_input(project, "datasets", dict(reversed(SPEC.items())))
    assert found is not None
    assert found.path == project / "data/datasets/chain_sum"
    assert found.location == "dvc.lock:dataset"
    recorded = yaml.safe_load((project / "dvc.lock").read_text())["stages"]["dataset"]["outs"][0]
    assert (found.dvc_hash, found.size_bytes) == (recorded["md5"], recorded["size"])
    assert folder_hash(read_folder(found.path)) == recorded["md5"]
    assert find_input(project, "datasets", {**SPEC, "family": "other"}) is None
    assert find_input(project, "base_models", SPEC) is None


def test_wiped_data_comes_back_from_the_cache_and_the_tree_stays_clean(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(project / "data/datasets/chain_sum")
    shutil.rmtree(project / "data/base_models/small")
    found = find_input(project, "datasets", SPEC)
    assert found is not None and (found.path / "train.parquet").is_file()
    # inside `dvc repro` DVC's own lock is held: nothing here may need it
    monkeypatch.setenv("DVC_STAGE", "retrain")
    assert find_input(project, "base_models", {"source": "small"}) is not None
    assert shell(project, "git", "status", "--porcelain") == ""
    assert "up to date" in shell(project, sys.executable, "-m", "dvc", "status")


def test_damaged_stage_output_is_named_and_refused(project: Path, tmp_path: Path) -> None:
    folder = project / "data/datasets/chain_sum"
    (folder / "manifest.json").chmod(0o644)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(HalfstepError, match=r"manifest\.json has md5"):
        find_input(project, "datasets", SPEC)
    shutil.rmtree(folder)
    version = find_input(project, "datasets", SPEC)
    assert version is not None
    cached = object_path(cache_dir(project), read_folder(folder)["train.parquet"])
    cached.chmod(0o644)
    cached.write_bytes(b"rowz" * 1000)
    cached.chmod(0o444)
    shutil.rmtree(folder)
    with pytest.raises(HalfstepError, match=r"is damaged .*train\.parquet has md5"):
        find_input(project, "datasets", SPEC)
    assert not folder.exists()


def test_stage_output_is_restored_by_hash(project: Path, tmp_path: Path) -> None:
    recorded = yaml.safe_load((project / "dvc.lock").read_text())["stages"]["base_model"]["outs"][0]["md5"]
    restored = restore_folder(project / "state" / "store", recorded, tmp_path / "out", project)
    assert folder_hash(read_folder(restored)) == recorded


def test_stored_input_is_found_by_key_checked_and_brought_back(tmp_path: Path) -> None:
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"spec": SPEC}))
    (folder / "rows").write_text("rows")
    stored = store_folder(tmp_path / "state" / "store", folder, "datasets", input_key(SPEC))
    assert find_input(tmp_path, "datasets", SPEC) == stored
    shutil.rmtree(stored.path)
    assert find_input(tmp_path, "datasets", SPEC) == stored
    (stored.path / "rows").unlink()
    with pytest.raises(HalfstepError, match="rows is missing"):
        find_input(tmp_path, "datasets", SPEC)
    assert find_input(tmp_path, "datasets", {"source": "unbuilt"}) is None


def test_key_does_not_depend_on_the_order_of_a_spec() -> None:
    assert input_key(SPEC) == input_key(dict(reversed(SPEC.items())))
    assert len(input_key(SPEC)) == 12
