"""Find a dataset or base model that is already built, by its spec, with its bytes checked."""

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from tasks.errors import HalfstepError
from tasks.files import file_lock
from tasks.records import ArtifactVersion
from tasks.versioning.folders import first_difference, folder_hash, object_path, read_folder, read_manifest
from tasks.versioning.restore import cache_dir, restore_folder
from tasks.versioning.store import Kind, check_entry, lock_path, read_pointer

Spec = dict[str, Any]


def canonical(spec: Spec) -> str:
    """Return the one JSON text of a spec."""
    return json.dumps(spec, sort_keys=True, separators=(",", ":"))


def input_key(spec: Spec) -> str:
    """Return the store's name for a spec: 12 hexadecimal digits of the sha256 of its canonical JSON."""
    return hashlib.sha256(canonical(spec).encode()).hexdigest()[:12]


def find_input(project_dir: Path, kind: Kind, spec: Spec, store_dir: Path | None = None) -> ArtifactVersion | None:
    """Return a built folder whose manifest.json names this spec, or None if there is none.

    Outputs of ``dvc.yaml`` that ``dvc.lock`` records come first (a folder that is gone is restored from the project's
    cache), then the store. Nothing is run through DVC in the project, so this also works inside a DVC stage.

    Raises:
        HalfstepError: it is there, but a file does not match its recorded hash; the file is named.
    """
    store_dir = store_dir or project_dir / "state" / "store"
    with file_lock(lock_path(store_dir)):
        return _find_stage_output(project_dir, store_dir, kind, spec) or _find_stored(project_dir, store_dir, kind, spec)


def _find_stage_output(project_dir: Path, store_dir: Path, kind: Kind, spec: Spec) -> ArtifactVersion | None:
    for version in _locked_outputs(project_dir, kind):
        cache = cache_dir(project_dir)
        manifest = read_manifest(cache, version.dvc_hash)
        # the cache's copy too: where the folder is gone, or its manifest.json is what was damaged
        texts = [version.path / "manifest.json"] + [
            object_path(cache, md5) for path, md5 in (manifest or {}).items() if path == "manifest.json"
        ]
        if not any(_names_spec(path, spec) for path in texts):
            continue
        if not version.path.is_dir():
            restore_folder(store_dir, version.dvc_hash, version.path, project_dir)
        found = read_folder(version.path)
        if folder_hash(found) != version.dvc_hash:
            raise HalfstepError(
                f"{version.path} does not hold the bytes that {version.location} records ({version.dvc_hash}) and is not used: "
                f"{first_difference(found, manifest)}. Delete the folder and run `make data`, which brings it back"
            )
        return version
    return None


def _locked_outputs(project_dir: Path, kind: Kind) -> list[ArtifactVersion]:
    lock = project_dir / "dvc.lock"
    if not lock.is_file():
        return []
    try:
        stages = (yaml.safe_load(lock.read_text(encoding="utf-8")) or {}).get("stages") or {}
        return [
            ArtifactVersion(path=project_dir / out["path"], dvc_hash=out["md5"], size_bytes=out["size"], location=f"dvc.lock:{stage}")
            for stage, body in stages.items()
            for out in body.get("outs") or []
            if out["path"].startswith(f"data/{kind}/")
        ]
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise HalfstepError(f"{lock} cannot be read: {error!r}; bring it back from git (`git checkout dvc.lock`)") from error


def _names_spec(path: Path, spec: Spec) -> bool:
    try:
        return canonical(json.loads(path.read_text(encoding="utf-8"))["spec"]) == canonical(spec)
    except (OSError, ValueError, KeyError, TypeError):
        # not a folder of ours, or half of one: it stands for no spec
        return False


def _find_stored(project_dir: Path, store_dir: Path, kind: Kind, spec: Spec) -> ArtifactVersion | None:
    version = read_pointer(store_dir, kind, input_key(spec))
    if version:
        check_entry(store_dir, version, project_dir)
    return version
