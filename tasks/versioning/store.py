"""The store of checkpoints and built inputs: `state/store`, a DVC repository without SCM.

To keep a second copy elsewhere, once: ``cd state/store && python -m dvc remote add -d NAME URL``; from then on each stored
folder is pushed too. The pointers (`<kind>/<name>.dvc`) are the keep-list of `dvc gc`.
"""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import yaml

from tasks.errors import HalfstepError, RefusedInput
from tasks.files import file_lock, folder_aside, write_aside
from tasks.records import ArtifactVersion
from tasks.versioning.folders import Manifest, folder_fault, folder_hash, hash_file, object_path, read_folder, read_manifest
from tasks.versioning.restore import cache_dir, check_version, default_remote

Kind = Literal["checkpoints", "datasets", "base_models"]

# hardlink first: with reflink first, DVC keeps a second whole copy where the file system has no reflinks
STORE_CONFIG = """[core]
    no_scm = True
    analytics = false
    check_update = false
[cache]
    type = "hardlink,reflink,copy"
"""

logger = logging.getLogger(__name__)


def lock_path(store_dir: Path) -> Path:
    """Return the lock in front of every DVC command of ours: DVC fails at once where another one is at work."""
    return store_dir.parent / "dvc.flock"


def run_dvc(repo_dir: Path, *arguments: str) -> None:
    """Run one DVC command; a failure carries DVC's own last lines."""
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments], cwd=repo_dir, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise HalfstepError(f"`dvc {' '.join(arguments)}` in {repo_dir} ended with exit code {done.returncode}:\n{lines}")


def store_folder(store_dir: Path, folder: Path, kind: Kind, name: str) -> ArtifactVersion:
    """Move a folder into the store as `<kind>/<name>` and return its version.

    `folder` is whole until its bytes are versioned and is removed then. Storing the same content again is harmless and
    repairs a damaged entry; with `folder` gone and the entry there, what failed after the move (the push) is done again.

    Raises:
        RefusedInput: no such folder, or the name already stands for other bytes.
        HalfstepError: DVC failed. After a failed push the bytes are safe in the store.
    """
    with file_lock(lock_path(store_dir)):
        config = store_dir / ".dvc" / "config"
        if not config.is_file():
            write_aside(config, STORE_CONFIG)
        stored = read_pointer(store_dir / kind / f"{name}.dvc")
        if folder.is_dir():
            version = _add(store_dir, folder, f"{kind}/{name}", stored)
        elif stored:
            # an earlier call moved it here and failed later, in the push
            version = check_version(stored, store_dir, store_dir)
        else:
            raise RefusedInput(f"cannot store {folder} as {kind}/{name}: it is not a folder")
        if (remote := default_remote(store_dir)) is not None:
            _push(store_dir, version, remote)
    return version


def _add(store_dir: Path, folder: Path, label: str, stored: ArtifactVersion | None) -> ArtifactVersion:
    manifest = read_folder(folder)
    own_hash = folder_hash(manifest)
    if stored and stored.dvc_hash != own_hash:
        raise RefusedInput(f"the store's {label} already holds {stored.dvc_hash}, not {own_hash}: choose another name for {folder}")
    _drop_damaged_objects(cache_dir(store_dir), manifest)
    try:
        with folder_aside(store_dir / label) as aside:
            shutil.copytree(folder, aside, copy_function=_link_or_copy, dirs_exist_ok=True)
    except OSError as error:
        raise HalfstepError(f"could not bring {folder} into the store as {label}: {error}; it is whole where it was") from error
    run_dvc(store_dir, "add", "--quiet", label)
    version = read_pointer(store_dir / f"{label}.dvc")
    if version is None or version.dvc_hash != own_hash:
        raise HalfstepError(f"DVC versioned {label} as {version and version.dvc_hash}, its bytes are {own_hash}; kept {folder}")
    shutil.rmtree(folder)
    return version


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        # another file system, or one without hard links
        shutil.copy2(source, target)


def _drop_damaged_objects(cache: Path, manifest: Manifest) -> None:
    # DVC trusts what its cache already holds, and would put a damaged object in the place of the good file at hand
    for md5 in (*manifest.values(), folder_hash(manifest)):
        path = object_path(cache, md5)
        if path.is_file() and hash_file(path) != md5.removesuffix(".dir"):
            logger.warning("%s is damaged; the good bytes at hand replace it", path)
            path.unlink()


def _push(store_dir: Path, version: ArtifactVersion, remote: str) -> None:
    target = version.location.removeprefix("store:")
    try:
        run_dvc(store_dir, "push", "--quiet", target)
    except HalfstepError as error:
        raise HalfstepError(
            f"{version.path} is safe in the store as {version.dvc_hash}, but could not be pushed to the remote {remote!r}. "
            f"Push it later: cd {store_dir} && {sys.executable} -m dvc push {target}\n{error}"
        ) from error


def read_pointer(pointer: Path) -> ArtifactVersion | None:
    """Return what a pointer of the store says, None where there is none."""
    if not pointer.is_file():
        return None
    out = yaml.safe_load(pointer.read_text(encoding="utf-8"))["outs"][0]
    location = f"store:{pointer.parent.name}/{pointer.name}"
    return ArtifactVersion(path=pointer.with_suffix(""), dvc_hash=out["md5"], size_bytes=out["size"], location=location)


def list_store(store_dir: Path) -> tuple[ArtifactVersion, ...]:
    """Return what the store's pointers keep."""
    return tuple(version for pointer in sorted(store_dir.glob("*/*.dvc")) if (version := read_pointer(pointer)))


def verify_store(store_dir: Path) -> tuple[str, ...]:
    """Read every byte the store keeps, in its cache and its folders; return one line for each fault."""
    with file_lock(lock_path(store_dir)):
        found = [(version, fault) for version in list_store(store_dir) for fault in _entry_faults(version, cache_dir(store_dir))]
    return tuple(f"{'/'.join(version.path.parts[-2:])}: {fault}" for version, fault in found)


def _entry_faults(version: ArtifactVersion, cache: Path) -> Iterator[str]:
    try:
        manifest = read_manifest(cache, version.dvc_hash)
    except HalfstepError as error:
        yield str(error)
        return
    if manifest is None:
        yield f"the cache does not know {version.dvc_hash}"
        return
    for relpath, md5 in manifest.items():
        path = object_path(cache, md5)
        found = hash_file(path) if path.is_file() else None
        if found != md5:
            state = f"damaged in the cache ({path} has md5 {found})" if found else f"missing from the cache ({path})"
            yield f"{relpath} is {state}"
    if version.path.is_dir() and (fault := folder_fault(version.path, version.dvc_hash, cache)):
        yield f"in the folder, {fault}"
