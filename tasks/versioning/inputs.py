"""Find a dataset or base model that is already built, by its spec, with its bytes checked."""

import hashlib
import json
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.repo import Repo

from tasks.errors import HalfstepError
from tasks.files import file_lock
from tasks.records import ArtifactVersion
from tasks.specs import MANIFEST_FILE, Spec
from tasks.versioning.folders import object_path, read_manifest
from tasks.versioning.restore import check_version
from tasks.versioning.store import Kind, lock_path, read_pointer


def input_key(spec: Spec) -> str:
    """Return the store's name for a spec: 12 hexadecimal digits of the sha256 of its canonical JSON."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]


def find_input(project_dir: Path, kind: Kind, spec: Spec, store_dir: Path | None = None) -> ArtifactVersion | None:
    """Return a built folder whose manifest.json names this spec, or None if there is none.

    Outputs of ``dvc.yaml`` that ``dvc.lock`` records come first (a folder that is gone is restored from the project's
    cache), then the store. Nothing is run through DVC in the project, so this also works inside a DVC stage.

    Raises:
        HalfstepError: it is there, but a file does not match its recorded hash; the file is named.
    """
    store_dir, key = store_dir or project_dir / "state" / "store", input_key(spec)
    with file_lock(lock_path(store_dir)):
        version = _find_stage_output(project_dir, kind, key) or read_pointer(store_dir / kind / f"{key}.dvc")
        return version and check_version(version, store_dir, project_dir)


def _find_stage_output(project_dir: Path, kind: Kind, key: str) -> ArtifactVersion | None:
    lock = project_dir / "dvc.lock"
    if not lock.is_file():
        return None
    try:
        with Repo(str(project_dir)) as repo:
            cache, outputs = Path(repo.cache.local.path), list(repo.index.outs)
    except DvcException as error:
        remedy = "if a file was damaged, bring it back from git (`git checkout dvc.yaml dvc.lock .dvc/config`)"
        raise HalfstepError(f"DVC cannot read {project_dir}: {error!r}; {remedy}") from error
    for out in outputs:
        path, dvc_hash = Path(out.fs_path), out.hash_info.value
        if dvc_hash and path.parent.parts[-2:] == ("data", kind):
            cached = (read_manifest(cache, dvc_hash) or {}).get(MANIFEST_FILE, "absent")
            # the cache's copy too: where the folder is gone, or its manifest.json is what was damaged
            if key in (_key_of(path / MANIFEST_FILE), _key_of(object_path(cache, cached))):
                return ArtifactVersion(path=path, dvc_hash=dvc_hash, size_bytes=out.meta.size, location=f"dvc.lock:{out.stage.name}")
    return None


def _key_of(manifest: Path) -> str | None:
    try:
        return input_key(json.loads(manifest.read_text(encoding="utf-8"))["spec"])
    except (OSError, ValueError, KeyError, TypeError):
        # not a folder of ours, or half of one: it stands for no spec
        return None
