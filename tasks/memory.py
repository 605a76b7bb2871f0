"""Decide whether a failure was a shortage of memory, and which kind. The only place that decides it; pure.

The exception's type counts first, its message second, evidence about the process third.
"""

import re
from typing import Literal

from pydantic import Field

from tasks.records import DeviceType, Record, ShortageKind

MB = 2**20

# Exceptions that are never a shortage, whatever their text, or what they were raised from, says.
_NEVER = frozenset({"ScorerFailed", "Diverged", "RefusedInput", "StopRequested"})
Holder = Literal["device", "host"]
# torch.OutOfMemoryError is raised for accelerators only
_TYPES: dict[str, Holder] = {"OutOfMemoryError": "device", "MemoryError": "host"}

# (whose memory ran out, pattern of a line of the message), device first; tests/test_memory.py holds a message of each with its
# public source. accelerate 1.15's should_reduce_batch_size knows only some of them.
_TEXTS: tuple[tuple[Holder, str], ...] = (
    # torch's allocators; the runtime and the driver below them; what torch asserts of NVML when it reports that memory ran out
    ("device", r"(CUDA|HIP|XPU|NPU|MPS backend) out of memory|(CUDA|HIP)( driver)? error: out of memory"),
    ("device", r"would exceed allowed memory|CUDA_ERROR_OUT_OF_MEMORY|(runtime error \(2\) |Triton Error \[(CUDA|HIP)\]).*: out of memory"),
    ("device", r"cudaErrorMemoryAllocation|hipErrorOutOfMemory|NVML_SUCCESS == .*INTERNAL ASSERT FAILED.*CUDACachingAllocator"),
    # libraries on CUDA and ROCm: BLAS, solvers, FFT, convolutions, collectives, 8-bit optimizers
    ("device", r"(CU|HIP)(BLAS|SOLVER|SPARSE)_STATUS_ALLOC_FAILED|SPARSE_STATUS_INSUFFICIENT_RESOURCES|FFT_ALLOC_FAILED"),
    ("device", r"CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)|rocblas_status_memory_error"),
    ("device", r"miopenStatusAllocFailed|Memory not available to allocate buffer|(Cuda|HIP) failure (\d+ )?'out of memory'"),
    ("device", r"Failed to CUDA calloc|Error out of memory at line \d+ in file"),
    # Level Zero, Metal (a buffer of size 0 is a fault of its own), Ascend; oneDNN, which computes on the host too
    ("device", r"(UR|PI|ZE)_(RESULT_)?ERROR_OUT_OF_(DEVICE_MEMORY|RESOURCES)"),
    ("device", r"kIOGPUCommandBufferCallbackErrorOutOfMemory|Invalid buffer size: [\d.]+ [KMGT]i?B|private MTLBuffer for size [1-9]"),
    ("device", r"EL0004\)?:.*Failed to allocate memory|Failed to apply for memory|could not create a memory object"),
    # vLLM
    ("device", r"No available memory for the cache blocks|[Ff]ree memory on device .* less than desired GPU memory utilization"),
    ("device", r"larger than the (available KV cache memory|maximum number of tokens that can be stored in KV cache)"),
    # torch on a CPU, glibc and C++; Rust (tokenizers, safetensors), Arrow, numpy, Python; the host's side of a device
    ("host", r"DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory|std::bad_alloc"),
    ("host", r"could not create a memory object|mkl_malloc: failed to allocate|libgomp: Out of memory allocating"),
    ("host", r"memory allocation of \d+ bytes failed|malloc of size \d+ failed|Unable to allocate .* for an array|^MemoryError"),
    ("host", r"(UR|PI|ZE)_(RESULT_)?ERROR_OUT_OF_HOST_MEMORY|CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
)
# said of a shortage and of other faults too (an unknown shape, a driver, a limit on threads): a shortage only where next to
# nothing was left on the device
_AMBIGUOUS = (
    r"could not (create|execute) a primitive|can't start new thread|CUBLAS_STATUS_NOT_INITIALIZED|nable to find an? (valid|engine)"
    r"|HSA_STATUS_ERROR_OUT_OF_RESOURCES"
)
SCARCE_BYTES = 32 * MB
# a log's lines that belong to others around them, what begins an account of a process's end, and how many lines tell of it at most
_INSIDE = re.compile(r"\s*$|  File |    |frame #")
_ACCOUNT = re.compile(r"Traceback \(most recent call last\)|terminate called|Fatal Python error: (?!Aborted)|Segmentation fault")
LAST_LINES = 8
# of what is in use: nearly every shortage on a GPU leaves some memory reserved and unused, too little to carry an attempt further
FRAGMENTED_SHARE = 0.05

_UNITS = {unit: 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1) for unit in (f"{letter}B", f"{letter}iB")}
_SIZE = r"(\d+\.?\d*)\s*(?:bytes|([KMGT]i?B))?"
_ASKED = r"ried to (?:allocate|mmap)|Unable to allocate|memory allocat(?:ion of|ing)|(?:malloc of|for) size|CUDA calloc|buffer(?: size)?:"
_REQUESTED = re.compile(rf"(?:{_ASKED}|Requested *:|desired GPU memory utilization \([\d.]+,)\s+{_SIZE}")
_FREE = re.compile(
    rf"of which {_SIZE} is free|; {_SIZE} free;|Free \(according to CUDA\): {_SIZE}|Available Free mem : {_SIZE}"
    r"|[Ff]ree memory on device [^(]*\((\d+\.?\d*)/\S+ ([KMGT]iB)"
)
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated|(?:MPS|Currently) allocated *: {_SIZE}")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_ALLOWED = re.compile(rf"{_SIZE} allowed;|max allowed: {_SIZE}|PyTorch limit [^:]*: {_SIZE}")
_OTHERS = re.compile(rf"other allocations: {_SIZE}")


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


def evidence_of(error: BaseException, device_type: DeviceType, available_bytes: int | None) -> Evidence:
    """Return what an exception says, with all that it was raised from or while handling, and the members of groups."""
    chain = [error]
    for inner in chain:  # it grows while it is walked
        cause = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)
        members = inner.exceptions if isinstance(inner, BaseExceptionGroup) else ()
        chain += [other for other in (cause, *members) if other and all(other is not known for known in chain)]
    return Evidence(
        device_type=device_type,
        error_types=tuple(dict.fromkeys(kind.__name__ for item in chain for kind in type(item).__mro__)),
        message="\ncaused by ".join(str(item) or type(item).__name__ for item in chain),
        available_bytes=available_bytes,
    )


def classify_shortage(evidence: Evidence) -> ShortageKind | None:
    """Return which memory ran out, or None if the failure was something else.

    On a CPU the device's memory is the host's: what a budget or the allocator refuses there is a device shortage;
    only a kill by the kernel is a host shortage. A CPU's allocator prints no figures of its heap: its fragmentation
    cannot be told from a shortage.
    """
    if _NEVER.intersection(evidence.error_types):
        return None
    by_type = (holder for name, holder in _TYPES.items() if name in evidence.error_types)
    holder = next(by_type, None) or _holder_of_text(evidence)
    if holder == "host" and evidence.device_type != "cpu":
        return "host"
    if holder is not None:
        return "fragmentation" if is_fragmented(evidence.message) else "device"
    return "host" if _killed_for_memory(evidence) else None


def _holder_of_text(evidence: Evidence) -> Holder | None:
    left = (size for size in (evidence.available_bytes, free_bytes(evidence.message)) if size is not None)
    if min(left, default=SCARCE_BYTES) < SCARCE_BYTES and re.search(_AMBIGUOUS, evidence.message):
        return "device"
    holders = (holder for holder, text in _TEXTS if re.search(text, evidence.message, re.MULTILINE))
    return next((holder for holder in holders if holder == "host" or evidence.device_type != "cpu"), None)


def _killed_for_memory(evidence: Evidence) -> bool:
    near_limit = evidence.host_memory_bytes is not None and (evidence.peak_rss_bytes or 0) > 0.95 * evidence.host_memory_bytes
    return evidence.killed_by_kernel and (evidence.cgroup_oom_kills > 0 or near_limit)


def last_words(log: str) -> str:
    """Return the few lines of a log that can tell why its process died: the last, not further back than its last traceback."""
    lines = [line for line in log.splitlines() if not _INSIDE.match(line)]
    start = max((number for number, line in enumerate(lines) if _ACCOUNT.search(line)), default=0)
    return "\n".join(lines[start:][-LAST_LINES:])


def is_fragmented(message: str) -> bool:
    """Return whether the allocator held enough unused memory for what it was asked for, and much of it."""
    requested, allocated, reserved = (_size(pattern, message) for pattern in (_REQUESTED, _ALLOCATED, _RESERVED))
    unused = _size(_UNUSED, message) if reserved is None else reserved - (allocated or 0)
    return requested is not None and unused is not None and unused >= max(requested, FRAGMENTED_SHARE * (allocated or 0))


def requested_bytes(message: str) -> int | None:
    """Return the bytes an allocator says it was asked for, if its message says so."""
    return _size(_REQUESTED, message)


def free_bytes(message: str) -> int | None:
    """Return the bytes an allocator says were free, or what a limit on the process left if that is less; None without figures."""
    allowed, free = _size(_ALLOWED, message), _size(_FREE, message)
    taken = sum(_size(pattern, message) or 0 for pattern in (_ALLOCATED, _UNUSED, _OTHERS))
    left = None if allowed is None else max(0, allowed - taken)
    return min((size for size in (free, left) if size is not None), default=None)


def _size(pattern: re.Pattern[str], message: str) -> int | None:
    if not (match := pattern.search(message)):
        return None
    number, *unit = (group for group in match.groups() if group is not None)
    return int(float(number) * (_UNITS[unit[0]] if unit else 1))
