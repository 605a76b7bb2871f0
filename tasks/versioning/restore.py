"""Bring a folder back bit for bit from its hash alone, or not at all."""

import os
import re
import shutil
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc_data.hashfile.hash_info import HashInfo

from tasks.errors import HalfstepError, RefusedInput
from tasks.places import PROJECT_DIR
from tasks.versioning.folders import Manifest, copy_checked, object_path, read_manifest


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
    """Restore a folder into an empty or missing `destination`, each file's md5 checked while it is copied.

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
    destination.parent.mkdir(parents=True, exist_ok=True)
    aside = destination.with_name(f".{destination.name}.restoring-{os.getpid()}")
    try:
        aside.mkdir()
        for relpath, md5 in manifest.items():
            source = object_path(cache, md5)
            if not copy_checked(source, aside / relpath, md5):
                raise HalfstepError(
                    f"{relpath} of {dvc_hash} is damaged and not used: {source} does not have its own md5; nothing was restored. "
                    "If a remote holds it, delete that cache file and restore again"
                )
        aside.replace(destination)
    except OSError as error:
        raise HalfstepError(f"could not restore {dvc_hash} into {destination}: {error}; nothing was left there") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return destination


def _locate(repos: list[Path], dvc_hash: str) -> tuple[Path, Manifest]:
    searched = []
    for repo in repos:
        cache = cache_dir(repo)
        if not (missing := _missing(cache, dvc_hash)):
            return cache, read_manifest(cache, dvc_hash) or {}
        searched.append(f"{cache} {missing}")
    for repo in repos:
        remote = default_remote(repo)
        if remote is None:
            continue
        fault = _fetch(repo, dvc_hash)
        cache = cache_dir(repo)
        if not (missing := _missing(cache, dvc_hash)):
            return cache, read_manifest(cache, dvc_hash) or {}
        searched.append(f"remote {remote!r}: {fault or missing}")
    raise HalfstepError(
        f"cannot restore {dvc_hash}: {'; '.join(searched) or 'there is no DVC repository here'}. "
        "Copy the bytes back, or name the remote that holds them: `dvc remote add -d NAME URL` in the store or the project"
    )


def _missing(cache: Path, dvc_hash: str) -> str:
    manifest = read_manifest(cache, dvc_hash)
    if manifest is None:
        return "does not know it"
    return next((f"lacks {relpath} (md5 {md5})" for relpath, md5 in manifest.items() if not object_path(cache, md5).is_file()), "")


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
