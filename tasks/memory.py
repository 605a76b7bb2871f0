"""Decide whether a failure was a shortage of memory, and which kind. The only place that decides it; pure.

The exception's type counts first, its message second, evidence about the process third. Here too: what a process is expected
to take, from what its tensors take.
"""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from tasks.records import DeviceType, MemoryLevers, MemoryPrediction, Phase, Precision, Record, ShortageKind

MB = 2**20

# Exceptions that are never a shortage, whatever their text says.
_NEVER = frozenset({"ScorerFailed", "Diverged", "RefusedInput", "StopRequested"})
# torch.OutOfMemoryError is raised for accelerators only.
_DEVICE_TYPES = frozenset({"OutOfMemoryError"})
_HOST_TYPES = frozenset({"MemoryError"})

Holder = Literal["device", "host"]

# (text found in the message, whose memory ran out). Sources: texts printed by torch's allocators, cuBLAS, cuDNN, NVML,
# vLLM and glibc; accelerate 1.15's should_reduce_batch_size knows only some of them.
_TEXTS: tuple[tuple[str, Holder], ...] = (
    ("CUDA out of memory", "device"),
    ("CUDA error: out of memory", "device"),
    ("HIP out of memory", "device"),
    ("XPU out of memory", "device"),
    ("NPU out of memory", "device"),
    ("MPS backend out of memory", "device"),
    ("CUBLAS_STATUS_ALLOC_FAILED", "device"),
    ("CUDNN_STATUS_ALLOC_FAILED", "device"),
    ("NVML_SUCCESS == r INTERNAL ASSERT FAILED", "device"),
    ("No available memory for the cache blocks", "device"),
    ("DefaultCPUAllocator: can't allocate memory", "host"),
    ("DefaultCPUAllocator: not enough memory", "host"),
    ("std::bad_alloc", "host"),
    ("Cannot allocate memory", "host"),
    ("can't start new thread", "host"),
)
# oneDNN says this of a shortage and of a shape it does not know: a shortage only where next to nothing was left
_AMBIGUOUS_TEXTS = ("could not create a primitive", "could not execute a primitive")
SCARCE_BYTES = 32 * MB

_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 2**10, "MB": 2**20, "GB": 2**30}
_SIZE = r"([\d.]+)\s*(bytes|[KMG]i?B)"
_REQUESTED = re.compile(r"(?:[Tt]ried to allocate|you tried to allocate)\s+" + _SIZE)
_FREE = re.compile(r"of which\s+" + _SIZE + r"\s+is free")
_RESERVED_UNUSED = re.compile(_SIZE + r"\s+is reserved by PyTorch but unallocated")


class PeakRequest(Record):
    """What a predicted peak depends on."""

    base_model_dir: Path
    out_file: Path
    device_type: DeviceType
    precision: Precision
    levers: MemoryLevers
    prompt_length: int = Field(ge=1, description="tokens of the longest prompt")
    completion_length: int = Field(ge=1, description="tokens")
    beta: float = Field(description="above 0 a reference model is held beside the policy")


class TensorBytes(Record):
    """What a dry run counted."""

    phases: dict[Phase, dict[str, int]] = Field(description="bytes of tensors by category at the peak of each phase")
    cache_elements: int = Field(description="of the rollout's KV cache when its last token is sampled")


class Overhead(Record):
    """What a process takes beyond its tensors on a kind of device."""

    runtime_bytes: int = Field(description="what libraries load and start after the imports")
    bf16_runtime_bytes: int = Field(description="what they take besides in bf16: oneDNN's compiled kernels and scratch memory")
    bytes_per_cache_element: float = Field(description="what the heap keeps: it goes with the KV cache's size, why is not known")
    error_share: float = Field(description="largest error on the peak that was measured, rounded up")


# Measured on scratch models of 0.1 and 11 million parameters, glibc's malloc, torch 2.13; `make bench-memory` scores it on others
CPU_OVERHEAD = Overhead(runtime_bytes=37 * MB, bf16_runtime_bytes=49 * MB, bytes_per_cache_element=13.4, error_share=0.15)
# not measured yet: what torch's caching allocator rounds and keeps is left to the error bound
DEVICE_OVERHEAD = Overhead(runtime_bytes=64 * MB, bf16_runtime_bytes=0, bytes_per_cache_element=0, error_share=0.3)


class Evidence(Record):
    """What is known of a failed process, from inside (exception) and outside (kernel)."""

    device_type: DeviceType
    error_types: tuple[str, ...] = Field(default=(), description="names of the exception's class and its bases")
    message: str = ""
    available_bytes: int | None = Field(default=None, description="what could still be allocated when the exception was caught")
    killed_by_kernel: bool = Field(default=False, description="the process ended by SIGKILL that its parent did not send")
    cgroup_oom_kills: int = Field(default=0, description="kills counted by the memory cgroup while the process ran")
    peak_rss_bytes: int | None = None
    host_memory_bytes: int | None = None


def expected_peak(counted: TensorBytes, request: PeakRequest) -> MemoryPrediction:
    """Return what a process is expected to take, from what its tensors take."""
    overhead = CPU_OVERHEAD if request.device_type == "cpu" else DEVICE_OVERHEAD
    beside = {
        "runtime": overhead.runtime_bytes + (overhead.bf16_runtime_bytes if request.precision.label == "bf16" else 0),
        "allocator": round(counted.cache_elements * overhead.bytes_per_cache_element),
    }
    phases = {phase: sum(sizes.values()) + sum(beside.values()) for phase, sizes in counted.phases.items()}
    phase = max(phases, key=phases.__getitem__)
    return MemoryPrediction(
        peak_bytes=phases[phase],
        error_bytes=round(phases[phase] * overhead.error_share),
        phase=phase,
        categories={**counted.phases[phase], **beside},
        phases=phases,
    )


def classify_shortage(evidence: Evidence) -> ShortageKind | None:
    """Return which memory ran out, or None if the failure was something else.

    On a CPU the device's memory is the host's: what a budget or the allocator refuses there is a device shortage;
    only a kill by the kernel is a host shortage.
    """
    if _NEVER.intersection(evidence.error_types):
        return None
    holder = _holder_of_type(evidence.error_types) or _holder_of_text(evidence)
    if holder == "host" and evidence.device_type != "cpu":
        return "host"
    if holder is not None:
        return "fragmentation" if is_fragmented(evidence.message) else "device"
    return "host" if _killed_for_memory(evidence) else None


def _holder_of_type(names: tuple[str, ...]) -> Holder | None:
    if _DEVICE_TYPES.intersection(names):
        return "device"
    return "host" if _HOST_TYPES.intersection(names) else None


def _holder_of_text(evidence: Evidence) -> Holder | None:
    scarce = evidence.available_bytes is not None and evidence.available_bytes < SCARCE_BYTES
    if scarce and any(text in evidence.message for text in _AMBIGUOUS_TEXTS):
        return "host"
    return next((holder for text, holder in _TEXTS if text in evidence.message), None)


def _killed_for_memory(evidence: Evidence) -> bool:
    if not evidence.killed_by_kernel:
        return False
    if evidence.cgroup_oom_kills > 0:
        return True
    if evidence.peak_rss_bytes is None or evidence.host_memory_bytes is None:
        return False
    return evidence.peak_rss_bytes > 0.95 * evidence.host_memory_bytes


def is_fragmented(message: str) -> bool:
    """Return whether the allocator held unused memory of at least the size that it was asked for."""
    requested, unused = requested_bytes(message), _size(_RESERVED_UNUSED.search(message))
    return requested is not None and unused is not None and unused >= requested


def requested_bytes(message: str) -> int | None:
    """Return the bytes an allocator says it was asked for, if its message says so."""
    return _size(_REQUESTED.search(message))


def free_bytes(message: str) -> int | None:
    """Return the bytes an allocator says were free, if its message says so."""
    return _size(_FREE.search(message))


def _size(match: re.Match[str] | None) -> int | None:
    return None if match is None else int(float(match.group(1)) * _UNITS[match.group(2)])
