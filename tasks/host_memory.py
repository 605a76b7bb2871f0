"""How much host memory and how many CPUs this process may use: the kernel's figures, and its cgroup limits (v2 and v1).

psutil does not know cgroups, so their files are read here. Sources: cgroups(7), proc_pid_mountinfo(5), the kernel's
admin-guide on cgroup-v2 (memory.max, memory.current, memory.stat, cpu.max), cgroup-v1/memory and sched-bwc.
"""

from pathlib import Path, PurePosixPath

import psutil
from pydantic import Field

from tasks.memory import MB
from tasks.records import Record

# cgroup v1 writes "no limit" as the largest multiple of a page that fits a signed 64-bit number
NO_LIMIT_BYTES = 2**60
# by controller, then by the kind of mount: v2 and v1
LIMIT_FILES = {
    "memory": {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"},
    "cpu": {"cgroup2": "cpu.max", "cgroup": "cpu.cfs_quota_us"},
}


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


def read_host_memory(proc_dir: Path = Path("/proc")) -> HostMemory:
    """Read total and available host memory and every cgroup limit that holds for this process."""
    memory = psutil.virtual_memory()
    limits: list[CgroupLimit] = []
    notes: list[str] = []
    for file in limit_files("memory", proc_dir):
        try:
            limit = _read_limit(file)
        except (OSError, ValueError, KeyError) as error:
            notes.append(f"memory limit {file} could not be read: {error}")
        else:
            limits += [limit] if limit else []
    return HostMemory(
        source="MemTotal of /proc/meminfo" if psutil.LINUX else "psutil.virtual_memory",
        total_bytes=memory.total,
        available_bytes=memory.available,
        limits=tuple(limits),
        notes=tuple(notes),
    )


def usable_cpus(visible: int, notes: list[str], proc_dir: Path = Path("/proc")) -> int:
    """Return how many whole CPUs the tightest CPU quota leaves of `visible`, at least one; a note says which quota."""
    usable = visible
    for file in limit_files("cpu", proc_dir):
        try:
            words = file.read_text().split()
            quota, period = words if len(words) == 2 else (words[0], file.with_name("cpu.cfs_period_us").read_text())
            whole = visible if quota in ("max", "-1") else max(1, int(quota) // int(period))
        except (OSError, ValueError, IndexError, ZeroDivisionError) as error:
            notes.append(f"CPU limit {file} could not be read: {error}")
            continue
        if whole < usable:
            notes.append(f"cgroup limit {file} leaves {whole} of {visible} CPUs")
            usable = whole
    return usable


def limit_files(controller: str, proc_dir: Path = Path("/proc")) -> list[Path]:
    """Return the limit file of each cgroup of this process that has one, its own first, then its ancestors' up to the mount."""
    membership, mounts = proc_dir / "self" / "cgroup", proc_dir / "self" / "mountinfo"
    if not membership.is_file() or not mounts.is_file():
        return []
    paths: dict[str, str] = {}
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif controller in controllers.split(","):
            paths["cgroup"] = path
    files: list[Path] = []
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in paths and (kind == "cgroup2" or controller in options.split(",")):
            root, mount = (field.replace(r"\040", " ") for field in before.split()[3:5])
            files += [directory / LIMIT_FILES[controller][kind] for directory in _upwards(Path(mount), root, paths[kind])]
    return [file for file in files if file.exists()]


def _upwards(mount: Path, root: str, path: str) -> list[Path]:
    # a container often mounts its own cgroup as the root, while /proc/self/cgroup still shows the host's path
    inside = PurePosixPath(path)
    relative = inside.relative_to(root if inside.is_relative_to(root) else "/")
    own = mount / relative if ".." not in relative.parts else mount
    return [own, *(parent for parent in own.parents if parent.is_relative_to(mount))]


def _read_limit(file: Path) -> CgroupLimit | None:
    text = file.read_text().strip()
    if text == "max" or int(text) >= NO_LIMIT_BYTES:
        return None
    v2 = file.name == "memory.max"
    counters = dict(line.split() for line in file.with_name("memory.stat").read_text().splitlines())
    charged = int(file.with_name("memory.current" if v2 else "memory.usage_in_bytes").read_text())
    used = charged - int(counters["inactive_file" if v2 else "total_inactive_file"])
    return CgroupLimit(file=str(file), limit_bytes=int(text), used_bytes=max(0, used))


def cgroup_oom_kills(proc_dir: Path = Path("/proc")) -> int:
    """Return how many processes the kernel has killed for memory in this process's own memory cgroup, 0 if unknown."""
    own = limit_files("memory", proc_dir)[:1]
    files = [limit.with_name(name) for limit in own for name in ("memory.events", "memory.oom_control")]
    lines = next((file.read_text().splitlines() for file in files if file.is_file()), [])
    return int(dict(line.split() for line in lines).get("oom_kill", 0))
