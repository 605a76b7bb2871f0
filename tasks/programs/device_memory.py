"""Measure and limit what a training process takes on its device.

One quantity per device, the same for budget, measurement and (later) prediction:

- CUDA and ROCm: memory reserved by torch's caching allocator (``torch.cuda.max_memory_reserved``).
- CPU: data segment (``VmData`` of /proc/self/status: heap and private writable maps) beyond its size when the imports were
  done. The kernel keeps no peak of it, so a thread samples it; the limit itself (``RLIMIT_DATA``) is exact.
"""

import contextlib
import resource
import sys
import threading
from pathlib import Path

import torch

from tasks.errors import RefusedInput
from tasks.memory import MB
from tasks.processes import peak_rss_bytes
from tasks.records import DeviceType

SAMPLE_SECONDS = 0.005
DATA = b"VmData:"
_STATUS = Path("/proc/self/status")


class DeviceMemory:
    """What training takes on its device; here where no better is known (macOS, XPU, NPU): peak resident set beyond the imports."""

    def __init__(self) -> None:
        self._floor = peak_rss_bytes(resource.getrusage(resource.RUSAGE_SELF))

    def set_budget(self, budget_bytes: int) -> None:
        """Let every allocation beyond `budget_bytes` fail; refused on a platform without a limit that an allocation would meet."""
        found = "a budget can be held only on CUDA, ROCm and Linux CPUs"
        raise RefusedInput(f"memory.budget_mb asks for {budget_bytes / MB:,.0f} MB, but {found}; leave it null")

    def lift_budget(self) -> None:
        """Take the limit away where writing down a failure would meet it."""

    def peak_bytes(self) -> int:
        """Return the highest use so far, beyond the imports."""
        return peak_rss_bytes(resource.getrusage(resource.RUSAGE_SELF)) - self._floor

    def available_bytes(self) -> int | None:
        """Return what could still be allocated now; None where it is not known."""
        return None

    def close(self) -> None:
        """Stop measuring."""


class CudaMemory(DeviceMemory):
    """CUDA and ROCm, through torch's caching allocator: beyond the budget it raises OutOfMemoryError."""

    _budget: int | None = None

    def set_budget(self, budget_bytes: int) -> None:
        """Limit torch's allocator on the first device."""
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total))
        self._budget = budget_bytes

    def peak_bytes(self) -> int:
        """Return the highest reserved memory over the devices."""
        return max(int(torch.cuda.max_memory_reserved(index)) for index in range(torch.cuda.device_count()))

    def available_bytes(self) -> int | None:
        """Return budget less reserved memory, or what the driver says is free."""
        if self._budget is None:
            return int(torch.cuda.mem_get_info()[0])
        return max(0, self._budget - int(torch.cuda.memory_reserved()))


class LinuxCpuMemory(DeviceMemory):
    """A CPU under Linux. Build it when the imports are done: its floor is the data segment at that moment."""

    def __init__(self) -> None:
        _start_thread_pools()
        self._peak = 0
        self._limit: int | None = None
        self._closed = threading.Event()
        sampler = threading.Thread(target=self._sample, daemon=True, name="memory-sampler")
        self._floor = own_bytes(DATA)
        sampler.start()

    def set_budget(self, budget_bytes: int) -> None:
        """Limit the data segment to floor + `budget_bytes`; beyond it torch's CPU allocator raises RuntimeError."""
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        asked = self._floor + budget_bytes
        self._limit = asked if hard == resource.RLIM_INFINITY else min(asked, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (self._limit, hard))

    def lift_budget(self) -> None:
        """Raise the soft limit to the hard one again."""
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def peak_bytes(self) -> int:
        """Return the highest sampled data segment beyond the floor."""
        self._peak = max(self._peak, own_bytes(DATA) - self._floor)
        return self._peak

    def available_bytes(self) -> int | None:
        """Return what the limit leaves now; None without a budget."""
        return None if self._limit is None else max(0, self._limit - own_bytes(DATA))

    def close(self) -> None:
        """End the sampler: one that is left behind slows down every thread of its process."""
        self._closed.set()

    def _sample(self) -> None:
        while not self._closed.wait(SAMPLE_SECONDS):
            with contextlib.suppress(MemoryError):  # the limit is met: sampling must outlive it
                self.peak_bytes()


def device_memory(device_type: DeviceType) -> DeviceMemory:
    """Return the meter of a device type, starting now."""
    if device_type in ("cuda", "rocm"):
        return CudaMemory()
    return LinuxCpuMemory() if device_type == "cpu" and sys.platform == "linux" else DeviceMemory()


def own_bytes(field: bytes) -> int:
    """Return a size that Linux tells of this process in /proc/self/status."""
    return int(_STATUS.read_bytes().partition(field)[2].split(maxsplit=1)[0]) * 1024


def _start_thread_pools() -> None:
    # thread stacks count as data: on a machine with many cores they would otherwise eat the budget
    square = torch.ones(512, 512)
    torch.mm(square, square)
    (square.requires_grad_() @ square).sum().backward()


def detect_device_type() -> DeviceType:
    """Return the device type on which transformers will put the model."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "cpu"
    return "rocm" if device.type == "cuda" and torch.version.hip else device.type
