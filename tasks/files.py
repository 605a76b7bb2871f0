"""Write files so that a reader sees the old one or the new one, never half of either; read one that grows by whole lines."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)


def write_aside(path: Path, text: str) -> None:
    """Write `text` to a neighbour of `path`, flush it to disk and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_record(path: Path, record: BaseModel) -> None:
    """Write a record as JSON, aside and renamed."""
    write_aside(path, record.model_dump_json(indent=2) + "\n")


def read_record(path: Path, kind: type[Model]) -> Model:
    """Read a record written by `write_record`."""
    return kind.model_validate_json(path.read_text(encoding="utf-8"))


@dataclass
class GrowingFile:
    """A file that another process appends to, read by whole lines, each of them once."""

    path: Path
    num_bytes: int = 0

    def new_lines(self) -> list[str]:
        """Return the lines that were finished since the last call; none as long as there is no file."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as stream:
            stream.seek(self.num_bytes)
            whole, end, _ = stream.read().rpartition(b"\n")
        self.num_bytes += len(whole + end)
        return whole.decode("utf-8", errors="replace").split("\n") if end else []


@contextlib.contextmanager
def folder_aside(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`, which replaces `path` when the block ends well and is removed when it does not."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if path.exists():
            shutil.rmtree(path)
        aside.replace(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def file_lock(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold an exclusive lock on a file, waiting in turn after `on_wait`; the kernel frees it at the process's end. Not reentrant."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
