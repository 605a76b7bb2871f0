"""Cgroup limits on memory and CPUs, read from files as the kernel writes them (case H4)."""

from pathlib import Path

import psutil
import pytest

from tasks.host_memory import HostMemory, cgroup_oom_kills, read_host_memory, usable_cpus

MB = 2**20
KILOBYTES = {
    "MemTotal": 8388608,
    "MemFree": 1048576,
    "MemAvailable": 6291456,
    **dict.fromkeys(("Buffers", "Cached", "Shmem", "Active", "Inactive"), 0),
}
MEMINFO = "".join(f"{name}: {size} kB\n" for name, size in KILOBYTES.items())


class Host:
    """A /proc and cgroup mounts in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proc = folder / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(MEMINFO)
        self.membership, self.mounts = "", ""

    def v2(self, path: str, limit: str, current: int = 0, inactive: int = 0) -> None:
        self._cgroup(self.folder / "fs" / path, "memory.max", limit, "memory.current", current, f"anon 1\ninactive_file {inactive}\n")

    def v1(self, path: str, limit: str, usage: int = 0, inactive: int = 0) -> None:
        stat = f"inactive_file 7\ntotal_inactive_file {inactive}\n"
        self._cgroup(self.folder / "fs" / "memory" / path, "memory.limit_in_bytes", limit, "memory.usage_in_bytes", usage, stat)

    def _cgroup(self, directory: Path, limit_name: str, limit: str, usage_name: str, usage: int, stat: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / limit_name).write_text(f"{limit}\n")
        (directory / usage_name).write_text(f"{usage}\n")
        (directory / "memory.stat").write_text(stat)

    def quota(self, path: str, **files: str) -> None:
        (self.folder / "fs" / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (self.folder / "fs" / path / name.replace("__", ".")).write_text(f"{text}\n")

    def read(self) -> HostMemory:
        self._place()
        return read_host_memory(self.proc)

    def cpus(self, visible: int) -> tuple[int, list[str]]:
        self._place()
        notes: list[str] = []
        return usable_cpus(visible, notes, self.proc), notes

    def _place(self) -> None:
        (self.proc / "self" / "cgroup").write_text(self.membership)
        (self.proc / "self" / "mountinfo").write_text(self.mounts)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(tmp_path)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(host.proc))
    return host


def v2_mount(host: Host, root: str = "/") -> str:
    return f"30 23 0:26 {root} {host.folder}/fs rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def v1_mount(host: Host, root: str = "/") -> str:
    return f"35 31 0:32 {root} {host.folder}/fs/memory rw,relatime - cgroup cgroup rw,memory\n"


def test_v2_the_tightest_of_all_ancestors_counts(host: Host) -> None:
    host.membership, host.mounts = "0::/user/job\n", v2_mount(host)
    host.v2("user/job", str(4096 * MB), current=100 * MB)
    host.v2("user", str(2048 * MB), current=512 * MB, inactive=12 * MB)
    memory = host.read()
    assert memory.usable_bytes == 2048 * MB
    assert memory.free_bytes == 1548 * MB
    assert f"{host.folder}/fs/user/memory.max" in memory.fact


def test_v2_max_is_no_limit(host: Host) -> None:
    host.membership, host.mounts = "0::/job\n", v2_mount(host)
    host.v2("job", "max", current=100 * MB)
    memory = host.read()
    assert (memory.usable_bytes, memory.free_bytes) == (8192 * MB, 6144 * MB)
    assert "no cgroup limit below it" in memory.fact


def test_a_limit_above_the_hosts_memory_changes_nothing(host: Host) -> None:
    host.membership, host.mounts = "0::/job\n", v2_mount(host)
    host.v2("job", str(2**40))
    assert host.read().usable_bytes == 8192 * MB
    assert "no cgroup limit below it" in host.read().fact


def test_v1_a_huge_number_is_no_limit(host: Host) -> None:
    host.membership, host.mounts = "9:name=systemd:/\n4:memory:/a/b\n0::/\n", v1_mount(host)
    host.v1("a/b", "9223372036854771712")
    host.v1("a", str(1024 * MB), usage=1000 * MB, inactive=600 * MB)
    memory = host.read()
    assert (memory.usable_bytes, memory.free_bytes) == (1024 * MB, 624 * MB)
    assert [limit.file for limit in memory.limits] == [f"{host.folder}/fs/memory/a/memory.limit_in_bytes"]


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner"])
def test_a_container_that_mounts_its_own_cgroup_as_the_root(host: Host, path: str) -> None:
    host.membership, host.mounts = f"4:cpu,memory:{path}\n", v1_mount(host, root="/docker/abc")
    host.v1("", str(1024 * MB), usage=24 * MB)
    assert host.read().usable_bytes == 1024 * MB


def test_a_cgroup_path_outside_the_mount_falls_back_to_the_mount(host: Host) -> None:
    host.membership, host.mounts = "0::/../sibling\n", v2_mount(host)
    host.v2("", str(1024 * MB))
    assert host.read().usable_bytes == 1024 * MB


def test_both_versions_mounted(host: Host) -> None:
    host.membership, host.mounts = "4:memory:/a\n0::/b\n", v1_mount(host) + v2_mount(host)
    host.v1("a", str(3072 * MB))
    host.v2("b", str(1024 * MB))
    assert host.read().usable_bytes == 1024 * MB


def test_a_limit_used_up_leaves_nothing(host: Host) -> None:
    host.membership, host.mounts = "0::/job\n", v2_mount(host)
    host.v2("job", str(1024 * MB), current=1500 * MB)
    assert host.read().free_bytes == 0


def test_an_unreadable_limit_is_noted_not_hidden(host: Host) -> None:
    host.membership, host.mounts = "0::/job\n", v2_mount(host)
    host.v2("job", "plenty")
    memory = host.read()
    assert memory.usable_bytes == 8192 * MB
    assert "could not be read" in memory.notes[0]


def test_h4_v2_cpu_quota_of_an_ancestor_counts_rounded_down(host: Host) -> None:
    host.membership, host.mounts = "0::/user/job\n", v2_mount(host)
    host.quota("user/job", cpu__max="max 100000")
    host.quota("user", cpu__max="765000 100000")
    cpus, notes = host.cpus(96)
    assert cpus == 7
    assert notes == [f"cgroup limit {host.folder}/fs/user/cpu.max leaves 7 of 96 CPUs"]


def test_h4_v1_cpu_quota_counts_and_a_fraction_of_a_cpu_is_one(host: Host) -> None:
    host.membership = "3:cpu,cpuacct:/a/b\n"
    host.mounts = f"35 31 0:32 / {host.folder}/fs/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    host.quota("cpu/a", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    host.quota("cpu/a/b", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert host.cpus(12)[0] == 2
    host.quota("cpu/a/b", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert host.cpus(12)[0] == 1


@pytest.mark.parametrize(("text", "notes"), [("max 100000", 0), ("1600000 100000", 0), ("much", 1), ("", 1), ("100000 0", 1)])
def test_a_cpu_quota_that_is_none_wide_or_unreadable_changes_nothing(host: Host, text: str, notes: int) -> None:
    host.membership, host.mounts = "0::/job\n", v2_mount(host)
    host.quota("job", cpu__max=text)
    assert host.cpus(8)[0] == 8
    assert len(host.cpus(8)[1]) == notes


def test_kills_of_its_own_cgroup_are_counted_in_both_versions(host: Host) -> None:
    host.membership, host.mounts = "0::/job\n", v2_mount(host)
    host.v2("job", "max")
    host.quota("job", memory__events="low 0\noom 3\noom_kill 2")
    host.read()
    assert cgroup_oom_kills(host.proc) == 2
    host.membership, host.mounts = "4:memory:/a\n", v1_mount(host)
    host.v1("a", str(1024 * MB))
    host.quota("memory/a", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 5")
    host.read()
    assert cgroup_oom_kills(host.proc) == 5


def test_no_proc_at_all(tmp_path: Path) -> None:
    memory = read_host_memory(tmp_path)
    assert memory.usable_bytes == memory.total_bytes > memory.available_bytes > 0
    assert "no cgroup limit below it" in memory.fact
    assert usable_cpus(8, [], tmp_path) == 8


def test_this_machine() -> None:
    memory = read_host_memory()
    assert 0 < memory.free_bytes <= memory.usable_bytes <= memory.total_bytes
