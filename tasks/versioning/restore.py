"""Bring a folder back bit for bit from its hash alone, or not at all."""

import os
import re
import shutil
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc_data.hashfile.hash_info import HashInfo

from tasks.errors import HalfstepError, RefusedInput
from tasks.files import folder_aside
from tasks.places import PROJECT_DIR
from tasks.records import ArtifactVersion
from tasks.versioning.folders import Manifest, folder_fault, object_path, read_manifest


def cache_dir(repo_dir: Path) -> Path:
    """Return where a DVC repository keeps its objects, wherever its configuration puts them."""
    with Repo(str(repo_dir)) as repo:
        return Path(repo.cache.local.path)


def default_remote(repo_dir: Path) -> str | None:
    """Return the name of the remote that `dvc push` would use, if one is configured."""
    with Repo(str(repo_dir)) as repo:
        name = repo.config["core"].get("remote")
    return None if name is None else str(name)


def restore_folder(store_dir: Path, dvc_hash: str, destination: Path, project_dir: Path = PROJECT_DIR) -> Path:
    """Restore a folder into an empty or missing `destination`, each file's md5 checked once it is copied.

    The store's cache is searched first, then the project's (outputs of ``dvc.yaml``), then their default remotes.

    Raises:
        RefusedInput: `dvc_hash` is no folder's hash, or `destination` holds something.
        HalfstepError: the bytes are nowhere, or damaged (the file is named); `destination` is left as it was.
    """
    if not re.fullmatch(r"[0-9a-f]{32}\.dir", dvc_hash):
        raise RefusedInput(
            f"{dvc_hash!r} is no hash of a folder: 32 hexadecimal digits and '.dir', as `python -m tasks.versioning list` shows"
        )
    if destination.is_symlink() or (destination.exists() and not (destination.is_dir() and not any(destination.iterdir()))):
        raise RefusedInput(f"cannot restore {dvc_hash} into {destination}: it is not an empty folder; name an empty or a missing one")
    cache, manifest = _locate([repo for repo in (store_dir, project_dir) if (repo / ".dvc").is_dir()], dvc_hash)
    try:
        with folder_aside(destination) as whole:
            for relpath, md5 in manifest.items():
                target = whole / relpath
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(object_path(cache, md5), target)
                with target.open("rb") as stream:
                    os.fsync(stream.fileno())
            if fault := folder_fault(whole, dvc_hash, cache):
                remedy = "If a remote holds it, delete the cache's file of the recorded md5 and restore again"
                raise HalfstepError(f"{dvc_hash} is damaged in {cache} and not used: {fault}; nothing was restored. {remedy}")
    except OSError as error:
        raise HalfstepError(f"could not restore {dvc_hash} into {destination}: {error}; nothing was left there") from error
    return destination


def _locate(repos: list[Path], dvc_hash: str) -> tuple[Path, Manifest]:
    """Return the cache that holds every file of a folder; caches are searched before any remote is asked."""
    searched = []
    remotes = [(repo, remote) for repo in repos if (remote := default_remote(repo))]
    for repo, remote in [*((repo, None) for repo in repos), *remotes]:
        fault = _fetch(repo, dvc_hash) if remote else ""
        cache = cache_dir(repo)
        manifest = read_manifest(cache, dvc_hash)
        lacking = (f"lacks {name} (md5 {md5})" for name, md5 in (manifest or {}).items() if not object_path(cache, md5).is_file())
        missing = "does not know it" if manifest is None else next(lacking, "")
        if manifest is not None and not missing:
            return cache, manifest
        searched.append(f"remote {remote!r}: {fault or missing}" if remote else f"{cache} {missing}")
    raise HalfstepError(
        f"cannot restore {dvc_hash}: {'; '.join(searched) or 'there is no DVC repository here'}. "
        "Copy the bytes back, or name the remote that holds them: `dvc remote add -d NAME URL` in the store or the project"
    )


def _fetch(repo_dir: Path, dvc_hash: str) -> str:
    # no pointer need exist for the hash, so `dvc fetch` has no target to name: what lies below that command is called
    try:
        with Repo(str(repo_dir)) as repo:
            repo.cloud.pull({HashInfo("md5", dvc_hash)})
            manifest = read_manifest(Path(repo.cache.local.path), dvc_hash) or {}
            repo.cloud.pull({HashInfo("md5", md5) for md5 in manifest.values()})
    except (DvcException, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_version(version: ArtifactVersion, store_dir: Path, project_dir: Path) -> ArtifactVersion:
    """Check a folder's bytes against its recorded hash, bringing back one that is gone.

    Raises:
        HalfstepError: a file differs; it is named.
    """
    if not version.path.is_dir():
        restore_folder(store_dir, version.dvc_hash, version.path, project_dir)
    in_store = version.location.startswith("store:")
    if fault := folder_fault(version.path, version.dvc_hash, cache_dir(store_dir if in_store else project_dir)):
        anew = f"delete {version.path.name}.dvc beside it too" if in_store else "run `make data` after that"
        raise HalfstepError(
            f"{version.path} does not hold the bytes that {version.location} records ({version.dvc_hash}) and is not used: "
            f"{fault}. Delete the folder: it comes back from the cache or a remote at its next use; to build it anew, {anew}"
        )
    return version
