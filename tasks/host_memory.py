"""How much host memory this process may use: the kernel's figures, and the limits of its memory cgroups (v2 and v1).

Only files under /proc and the cgroup mounts are read. Sources: cgroups(7), proc_pid_mountinfo(5), the kernel's
admin-guide on cgroup-v2 (memory.max, memory.current, memory.stat) and on cgroup-v1/memory.
"""

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pydantic import Field

from tasks.records import Record

MB = 2**20
# cgroup v1 writes "no limit" as the largest multiple of a page that fits a signed 64-bit number
NO_LIMIT_BYTES = 2**60


class CgroupLimit(Record):
    """One memory limit that holds for this process, its own cgroup's or an ancestor's."""

    file: str
    limit_bytes: int
    used_bytes: int = Field(description="charged now, less the file cache that the kernel drops first")


class HostMemory(Record):
    """Host memory as the kernel counts it, with the cgroup limits that hold for this process."""

    source: str
    total_bytes: int
    available_bytes: int
    limits: tuple[CgroupLimit, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """Return what this process may use at most."""
        return min([self.total_bytes, *(limit.limit_bytes for limit in self.limits)])

    @property
    def free_bytes(self) -> int:
        """Return what this process may still take now."""
        return max(0, min([self.available_bytes, *(limit.limit_bytes - limit.used_bytes for limit in self.limits)]))

    @property
    def fact(self) -> str:
        """Return where `usable_bytes` was read."""
        tightest = min(self.limits, key=lambda limit: limit.limit_bytes, default=None)
        if tightest is None or tightest.limit_bytes >= self.total_bytes:
            return f"{self.source}, {self.total_bytes // MB} MB; no cgroup limit below it"
        return f"cgroup limit {tightest.file}, {tightest.limit_bytes // MB} MB of the host's {self.total_bytes // MB} MB"


class CgroupFiles(NamedTuple):
    """Names of the files of one cgroup version."""

    limit: str
    usage: str
    droppable: str


V2 = CgroupFiles("memory.max", "memory.current", "inactive_file")
V1 = CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True)
class MemoryCgroup:
    """A directory of the memory controller that this process is counted in."""

    directory: Path
    files: CgroupFiles


def read_host_memory(proc_dir: Path = Path("/proc")) -> HostMemory:
    """Read total and available host memory and every cgroup limit that holds for this process."""
    meminfo = proc_dir / "meminfo"
    if not meminfo.is_file():
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        note = f"{meminfo} does not exist: memory held by other processes is not known, all of the host's counts as available"
        return HostMemory(source="sysconf SC_PHYS_PAGES", total_bytes=total, available_bytes=total, notes=(note,))
    kilobytes = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in meminfo.read_text().splitlines())}
    limits: list[CgroupLimit] = []
    notes: list[str] = []
    for cgroup in memory_cgroups(proc_dir):
        try:
            limit = _read_limit(cgroup)
        except (OSError, ValueError, KeyError) as error:
            notes.append(f"memory limit of cgroup {cgroup.directory} could not be read: {error}")
        else:
            limits += [limit] if limit else []
    return HostMemory(
        source=f"MemTotal of {meminfo}",
        total_bytes=kilobytes["MemTotal"] * 1024,
        available_bytes=kilobytes["MemAvailable"] * 1024,
        limits=tuple(limits),
        notes=tuple(notes),
    )


def memory_cgroups(proc_dir: Path = Path("/proc")) -> tuple[MemoryCgroup, ...]:
    """Return the memory cgroups of this process, its own first, then its ancestors up to the mount."""
    membership, mounts = proc_dir / "self" / "cgroup", proc_dir / "self" / "mountinfo"
    if not membership.is_file() or not mounts.is_file():
        return ()
    paths: dict[CgroupFiles, str] = {}
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[V2] = path
        elif "memory" in controllers.split(","):
            paths[V1] = path
    return tuple(
        MemoryCgroup(directory, files)
        for line in mounts.read_text().splitlines()
        for files, root, mount in _memory_mount(line)
        if files in paths
        for directory in _upwards(mount, root, paths[files])
        if (directory / files.limit).exists()
    )


def _memory_mount(line: str) -> list[tuple[CgroupFiles, str, Path]]:
    before, _, after = line.partition(" - ")
    kind, _, options = after.split(" ", 2)
    root, mount = (field.replace(r"\040", " ") for field in before.split()[3:5])
    if kind == "cgroup2":
        return [(V2, root, Path(mount))]
    if kind == "cgroup" and "memory" in options.split(","):
        return [(V1, root, Path(mount))]
    return []


def _upwards(mount: Path, root: str, path: str) -> list[Path]:
    # a container often mounts its own cgroup as the root, while /proc/self/cgroup still shows the host's path
    inside = PurePosixPath(path)
    relative = inside.relative_to(root if inside.is_relative_to(root) else "/")
    own = mount / relative if ".." not in relative.parts else mount
    return [own, *(parent for parent in own.parents if parent.is_relative_to(mount))]


def _read_limit(cgroup: MemoryCgroup) -> CgroupLimit | None:
    file = cgroup.directory / cgroup.files.limit
    text = file.read_text().strip()
    if text == "max" or int(text) >= NO_LIMIT_BYTES:
        return None
    counters = dict(line.split() for line in (cgroup.directory / "memory.stat").read_text().splitlines())
    used = int((cgroup.directory / cgroup.files.usage).read_text()) - int(counters[cgroup.files.droppable])
    return CgroupLimit(file=str(file), limit_bytes=int(text), used_bytes=max(0, used))


def cgroup_oom_kills(proc_dir: Path = Path("/proc")) -> int:
    """Return how many processes the kernel has killed for memory in this process's own memory cgroup, 0 if unknown."""
    for cgroup in memory_cgroups(proc_dir)[:1]:
        for name in ("memory.events", "memory.oom_control"):
            file = cgroup.directory / name
            if file.is_file():
                counters = dict(line.split() for line in file.read_text().splitlines())
                return int(counters["oom_kill"]) if "oom_kill" in counters else 0
    return 0
