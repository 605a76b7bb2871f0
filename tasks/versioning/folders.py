"""A folder's hash as DVC computes it, and the first file that differs from it.

DVC's directory object is the JSON list of ``{"md5", "relpath"}`` sorted by relpath; its md5 with '.dir' appended names the
folder. DVC itself trusts any cache file of mode 0444 without reading it, so every check of bytes is made here.
"""

import hashlib
import json
from pathlib import Path

from tasks.errors import HalfstepError, RefusedInput

# path inside the folder, with '/', to the file's md5
Manifest = dict[str, str]


def hash_file(path: Path) -> str:
    """Return the md5 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def read_folder(folder: Path) -> Manifest:
    """Hash every file of a folder.

    Raises:
        RefusedInput: a symbolic link to a folder, which DVC would leave out without a word.
    """
    manifest: Manifest = {}
    for path in folder.rglob("*"):
        if not path.is_dir():
            manifest[path.relative_to(folder).as_posix()] = hash_file(path)
        elif path.is_symlink():
            raise RefusedInput(f"{path} is a symbolic link to a folder; DVC would leave it out: put the real folder there")
    return manifest


def folder_hash(manifest: Manifest) -> str:
    """Return DVC's hash of a folder with these files."""
    rows = [{"md5": manifest[relpath], "relpath": relpath} for relpath in sorted(manifest)]
    return hashlib.md5(json.dumps(rows, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"


def object_path(cache_dir: Path, oid: str) -> Path:
    """Return where a DVC cache keeps the bytes of a hash."""
    return cache_dir / oid[:2] / oid[2:]


def read_manifest(cache_dir: Path, dvc_hash: str) -> Manifest | None:
    """Read a folder's file list from a cache; None if the cache does not hold it.

    Raises:
        HalfstepError: the list's own bytes do not match its hash.
    """
    path = object_path(cache_dir, dvc_hash)
    if not path.is_file():
        return None
    found = hash_file(path)
    if f"{found}.dir" != dvc_hash:
        raise HalfstepError(
            f"the file list of {dvc_hash} is damaged and not used: {path} has md5 {found}; put it back from a copy or remote"
        )
    return {row["relpath"]: row["md5"] for row in json.loads(path.read_text(encoding="utf-8"))}


def folder_fault(folder: Path, dvc_hash: str, cache_dir: Path) -> str:
    """Name the first file in which a folder differs from what its hash stands for; '' if none does."""
    found = read_folder(folder)
    if folder_hash(found) == dvc_hash:
        return ""
    recorded = read_manifest(cache_dir, dvc_hash)
    if recorded is None:
        return "its recorded file list is in no cache here, so the file cannot be named"
    relpath = min(name for name in found | recorded if found.get(name) != recorded.get(name))
    if relpath not in found:
        return f"{relpath} is missing"
    return f"{relpath} has md5 {found[relpath]}, recorded is {recorded[relpath]}" if relpath in recorded else f"{relpath} was added"
