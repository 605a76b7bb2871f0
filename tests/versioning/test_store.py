"""The store with real DVC: bytes in, bytes back from the hash alone, damage named, commands that queue."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.errors import HalfstepError, RefusedInput
from tasks.places import PROJECT_DIR
from tasks.versioning.folders import folder_hash, object_path, read_folder
from tasks.versioning.restore import cache_dir, restore_folder
from tasks.versioning.store import STORE_CONFIG, list_store, store_folder, verify_store


def make_folder(path: Path, content: str = "weights") -> Path:
    (path / "sub").mkdir(parents=True)
    (path / "model.bin").write_bytes(os.urandom(50_000) + content.encode())
    (path / "sub" / "é config.json").write_text('{"a": 1}')
    (path / "sub.txt").write_text("sorts between sub/ and submarine")
    return path


def flip_bit(path: Path) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    path.chmod(0o444)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tasks.versioning", *arguments], cwd=PROJECT_DIR, capture_output=True, text=True)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "state" / "store"


def test_folder_comes_back_bit_for_bit_from_its_hash(tmp_path: Path, store: Path) -> None:
    folder = make_folder(tmp_path / "checkpoint")
    bytes_before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    own_hash = folder_hash(read_folder(folder))
    version = store_folder(store, folder, "checkpoints", "run-1.5")
    assert version.dvc_hash == own_hash
    assert version.size_bytes == sum(map(len, bytes_before.values()))
    assert not folder.exists()
    # one copy of the bytes on disk, not two
    assert (version.path / "model.bin").samefile(object_path(cache_dir(store), read_folder(version.path)["model.bin"]))

    (store / "checkpoints" / "run-1.5.dvc").unlink()
    restored = restore_folder(store, version.dvc_hash, tmp_path / "out" / "here", project_dir=tmp_path)
    assert {path.relative_to(restored): path.read_bytes() for path in restored.rglob("*") if path.is_file()} == bytes_before
    assert list((tmp_path / "out").iterdir()) == [restored]


def test_storing_the_same_content_again_is_harmless_and_other_content_is_refused(tmp_path: Path, store: Path) -> None:
    folder = make_folder(tmp_path / "a")
    twin = tmp_path / "twin"
    subprocess.run(["cp", "-r", folder, twin], check=True)
    # a leftover of a run that was killed before `dvc add`
    make_folder(store / "datasets" / "key")
    first = store_folder(store, folder, "datasets", "key")
    assert store_folder(store, twin, "datasets", "key") == first
    assert not twin.exists()
    assert store_folder(store, twin, "datasets", "key") == first
    with pytest.raises(RefusedInput, match="not a folder"):
        store_folder(store, twin, "datasets", "another")
    other = make_folder(tmp_path / "other")
    with pytest.raises(RefusedInput, match="already holds"):
        store_folder(store, other, "datasets", "key")
    assert other.is_dir()
    assert [version.dvc_hash for version in list_store(store)] == [first.dvc_hash]
    with pytest.raises(RefusedInput, match="symbolic link"):
        (other / "link").symlink_to(tmp_path)
        store_folder(store, other, "datasets", "linked")


def test_two_processes_storing_at_once_queue(tmp_path: Path, store: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tasks.versioning.store import store_folder; "
        "store_folder(Path(sys.argv[1]), Path(sys.argv[2]), 'checkpoints', sys.argv[3])"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(store), str(make_folder(tmp_path / name)), name], cwd=PROJECT_DIR)
        for name in "ab"
    ]
    assert [child.wait() for child in children] == [0, 0]
    assert [version.path.name for version in list_store(store)] == ["a", "b"]
    assert verify_store(store) == ()


def test_flipped_bit_is_named_not_used_and_mended_by_storing_again(tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_folder(tmp_path / "a")
    twin = tmp_path / "twin"
    subprocess.run(["cp", "-r", folder, twin], check=True)
    version = store_folder(store, folder, "checkpoints", "a")
    flip_bit(version.path / "model.bin")  # the cache's bytes too: they are one file

    destination = tmp_path / "out"
    result = command("--store", str(store), "restore", version.dvc_hash, str(destination))
    assert result.returncode == 1
    assert "model.bin" in result.stderr and "damaged" in result.stderr and "Traceback" not in result.stderr
    assert not destination.exists()
    assert len(verify_store(store)) == 2
    listed = command("--store", str(store), "verify")
    assert listed.returncode == 1 and "checkpoints/a: model.bin is damaged in the cache" in listed.stdout

    with caplog.at_level(logging.WARNING):
        store_folder(store, twin, "checkpoints", "a")
    assert "damaged" in caplog.text
    assert verify_store(store) == ()
    assert restore_folder(store, version.dvc_hash, destination, tmp_path).is_dir()


def test_non_empty_destination_and_unknown_hash_are_refused(tmp_path: Path, store: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep me")
    result = command("--store", str(store), "restore", "0" * 32 + ".dir", str(tmp_path / "full"))
    assert result.returncode == 2 and "not an empty folder" in result.stderr and "Traceback" not in result.stderr
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    with pytest.raises(RefusedInput, match="no hash of a folder"):
        restore_folder(store, "0" * 32, tmp_path / "new", tmp_path)
    with pytest.raises(HalfstepError, match="cannot restore"):
        restore_folder(store, "0" * 32 + ".dir", tmp_path / "new", tmp_path)
    assert not (tmp_path / "new").exists()
    assert list_store(store) == ()


def test_remote_gets_each_folder_and_gives_it_back_when_the_store_is_wiped(tmp_path: Path, store: Path) -> None:
    (store / ".dvc").mkdir(parents=True)
    url = tmp_path / "remote"
    (store / ".dvc" / "config").write_text(
        f"{STORE_CONFIG}['remote \"second\"']\n    url = {url}\n".replace("[cache]", "    remote = second\n[cache]")
    )
    version = store_folder(store, make_folder(tmp_path / "b"), "checkpoints", "b")
    subprocess.run(["rm", "-rf", store / ".dvc" / "cache", store / "checkpoints"], check=True)
    restored = restore_folder(store, version.dvc_hash, tmp_path / "back", tmp_path)
    assert folder_hash(read_folder(restored)) == version.dvc_hash

    url.rename(tmp_path / "away")
    url.write_text("no folder can be made below a file")
    with pytest.raises(HalfstepError, match=r"safe in the store as .*\n?.*dvc push"):
        store_folder(store, make_folder(tmp_path / "c"), "checkpoints", "c")
    assert (store / "checkpoints" / "c.dvc").is_file()
    with pytest.raises(HalfstepError, match="remote 'second'"):
        restore_folder(store, "0" * 32 + ".dir", tmp_path / "never", tmp_path)
