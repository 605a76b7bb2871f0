"""The meter of a device's memory."""

import sys
import threading
import time

import pytest
import torch

from tasks.errors import RefusedInput
from tasks.memory import MB
from tasks.programs import device_memory
from tasks.programs.device_memory import DeviceMemory, LinuxCpuMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status is Linux's")


def test_a_budget_that_cannot_be_held_is_refused_with_its_unit() -> None:
    with pytest.raises(RefusedInput, match="asks for 1,500 MB, but a budget can be held only on"):
        DeviceMemory().set_budget(1500 * MB)


def test_what_is_freed_again_counts_and_a_closed_meter_leaves_no_thread() -> None:
    meter = LinuxCpuMemory()
    held = torch.ones(64, MB, dtype=torch.uint8)
    time.sleep(0.1)
    del held
    assert meter.peak_bytes() >= 64 * MB
    # each one that is left behind samples on, 200 times a second, and slows what its process does next
    meter.close()
    deadline = time.monotonic() + 60
    while (left := _samplers()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []


def test_sampling_outlives_a_moment_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, failed = LinuxCpuMemory(), threading.Event()

    def nothing_left(field: bytes) -> int:
        failed.set()
        raise MemoryError

    with monkeypatch.context() as starved:
        starved.setattr(device_memory, "own_bytes", nothing_left)
        assert failed.wait(60)
    held = torch.ones(64, MB, dtype=torch.uint8)
    time.sleep(0.1)
    assert meter._peak >= held.nbytes
    meter.close()


def _samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memory-sampler"]
