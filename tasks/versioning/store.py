"""The store of checkpoints and built inputs: `state/store`, a DVC repository without SCM.

To keep a second copy elsewhere, once: ``cd state/store && python -m dvc remote add -d NAME URL``; from then on each stored
folder is pushed too. The pointers (`<kind>/<name>.dvc`) are the keep-list of `dvc gc`.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import yaml

from tasks.errors import HalfstepError, RefusedInput
from tasks.files import file_lock, write_aside
from tasks.records import ArtifactVersion
from tasks.versioning.folders import (
    Manifest,
    first_difference,
    folder_hash,
    hash_file,
    object_path,
    read_folder,
    read_manifest,
)
from tasks.versioning.restore import cache_dir, default_remote, restore_folder

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
        RefusedInput: no such folder, an unusable name, or the name already stands for other bytes.
        HalfstepError: DVC failed. After a failed push the bytes are safe in the store.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or name.endswith(".dvc"):
        raise RefusedInput(f"cannot store under the name {name!r}: letters, digits, '.', '_' and '-', not ending in .dvc")
    with file_lock(lock_path(store_dir)):
        _open_store(store_dir)
        stored = read_pointer(store_dir, kind, name)
        if folder.is_dir():
            version = _add(store_dir, folder, kind, name, stored)
        elif stored:
            # an earlier call moved it here and failed later, in the push
            check_entry(store_dir, stored, store_dir)
            version = stored
        else:
            raise RefusedInput(f"cannot store {folder} as {kind}/{name}: it is not a folder")
        if (remote := default_remote(store_dir)) is not None:
            _push(store_dir, version, remote)
    return version


def _open_store(store_dir: Path) -> None:
    if not (store_dir / ".dvc").is_dir():
        store_dir.mkdir(parents=True, exist_ok=True)
        run_dvc(store_dir, "init", "--no-scm", "--quiet")
    config = store_dir / ".dvc" / "config"
    if not config.is_file() or "[cache]" not in config.read_text(encoding="utf-8"):
        write_aside(config, STORE_CONFIG)


def _add(store_dir: Path, folder: Path, kind: Kind, name: str, stored: ArtifactVersion | None) -> ArtifactVersion:
    manifest = read_folder(folder)
    if stored and stored.dvc_hash != folder_hash(manifest):
        raise RefusedInput(
            f"the store's {kind}/{name} already holds {stored.dvc_hash}, not {folder_hash(manifest)}: choose another name for {folder}"
        )
    entry = store_dir / kind / name
    aside = entry.with_name(f".incoming-{name}")
    _drop_damaged_objects(cache_dir(store_dir), manifest)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(folder, aside, copy_function=_link_or_copy)
        if entry.exists():
            shutil.rmtree(entry)
        aside.replace(entry)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise HalfstepError(f"could not bring {folder} into the store as {kind}/{name}: {error}; it is whole where it was") from error
    run_dvc(store_dir, "add", "--quiet", f"{kind}/{name}")
    version = read_pointer(store_dir, kind, name)
    if version is None or version.dvc_hash != folder_hash(manifest):
        raise HalfstepError(
            f"DVC versioned {kind}/{name} as {version and version.dvc_hash}, its bytes are {folder_hash(manifest)}; kept {folder}"
        )
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


def read_pointer(store_dir: Path, kind: str, name: str) -> ArtifactVersion | None:
    """Return what the store's pointer of an entry says, None without one."""
    pointer = store_dir / kind / f"{name}.dvc"
    if not pointer.is_file():
        return None
    out = yaml.safe_load(pointer.read_text(encoding="utf-8"))["outs"][0]
    return ArtifactVersion(
        path=pointer.with_suffix(""), dvc_hash=out["md5"], size_bytes=out["size"], location=f"store:{kind}/{pointer.name}"
    )


def list_store(store_dir: Path) -> tuple[ArtifactVersion, ...]:
    """Return what the store's pointers keep."""
    found = (read_pointer(store_dir, path.parent.name, path.stem) for path in sorted(store_dir.glob("*/*.dvc")))
    return tuple(version for version in found if version)


def check_entry(store_dir: Path, version: ArtifactVersion, project_dir: Path) -> None:
    """Check an entry's bytes against its pointer, bringing back a folder that is gone.

    Raises:
        HalfstepError: a file differs; it is named.
    """
    if not version.path.is_dir():
        restore_folder(store_dir, version.dvc_hash, version.path, project_dir)
    found = read_folder(version.path)
    if folder_hash(found) != version.dvc_hash:
        difference = first_difference(found, read_manifest(cache_dir(store_dir), version.dvc_hash))
        raise HalfstepError(
            f"{version.path} does not hold the bytes of {version.dvc_hash} and is not used: {difference}. Delete the folder: it comes "
            f"back from the cache or a remote at its next use; to build it anew, delete {version.path.name}.dvc beside it too"
        )


def verify_store(store_dir: Path) -> tuple[str, ...]:
    """Read every byte the store keeps, in its cache and its folders; return one line for each fault."""
    faults = []
    with file_lock(lock_path(store_dir)):
        for version in list_store(store_dir):
            label = version.location.removeprefix("store:").removesuffix(".dvc")
            faults += [f"{label}: {fault}" for fault in _entry_faults(version, cache_dir(store_dir))]
    return tuple(faults)


def _entry_faults(version: ArtifactVersion, cache: Path) -> list[str]:
    try:
        manifest = read_manifest(cache, version.dvc_hash)
    except HalfstepError as error:
        return [str(error)]
    if manifest is None:
        return [f"the cache does not know {version.dvc_hash}"]
    faults = []
    for relpath, md5 in manifest.items():
        path = object_path(cache, md5)
        if not path.is_file():
            faults.append(f"{relpath} is missing from the cache ({path})")
        elif (found := hash_file(path)) != md5:
            faults.append(f"{relpath} is damaged in the cache ({path} has md5 {found})")
    if version.path.is_dir() and folder_hash(files := read_folder(version.path)) != version.dvc_hash:
        faults.append(f"in the folder, {first_difference(files, manifest)}")
    return faults
