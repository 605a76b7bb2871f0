"""Which failures are a shortage of memory, and of which memory."""

import pytest

from tasks.memory import Evidence, classify_shortage, free_bytes, requested_bytes

CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1.20 GiB is free. "
    "Of the allocated memory 12.00 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."
)
FRAGMENTED = CUDA_OOM.replace("300.00 MiB is reserved", "3.10 GiB is reserved")
CPU_OOM = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 67108864 bytes. "
    "Error code 12 (Cannot allocate memory)"
)


def evidence(device_type: str, message: str = "", *types: str, **more: object) -> Evidence:
    return Evidence.model_validate({"device_type": device_type, "message": message, "error_types": types, **more})


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (evidence("cuda", CUDA_OOM, "OutOfMemoryError", "RuntimeError"), "device"),
        (evidence("cuda", FRAGMENTED, "OutOfMemoryError", "RuntimeError"), "fragmentation"),
        (evidence("cuda", "CUDA error: out of memory", "RuntimeError"), "device"),
        (evidence("cuda", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "RuntimeError"), "device"),
        (evidence("cuda", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "RuntimeError"), "device"),
        (evidence("cuda", "NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp", "RuntimeError"), "device"),
        (evidence("cuda", "No available memory for the cache blocks. Try increasing gpu_memory_utilization", "ValueError"), "device"),
        (evidence("rocm", "HIP out of memory. Tried to allocate 20.00 MiB", "OutOfMemoryError"), "device"),
        (evidence("cuda", CPU_OOM, "RuntimeError"), "host"),
        (evidence("cuda", "", "MemoryError", "Exception"), "host"),
        (evidence("cpu", CPU_OOM, "RuntimeError"), "device"),
        (evidence("cpu", "", "MemoryError", "Exception"), "device"),
        (evidence("cpu", "std::bad_alloc", "RuntimeError"), "device"),
        (evidence("cpu", "could not create a primitive", "RuntimeError", available_bytes=2**20), "device"),
        (evidence("cpu", "could not create a primitive", "RuntimeError", available_bytes=2**30), None),
        (evidence("cpu", "could not create a primitive", "RuntimeError"), None),
        (evidence("cpu", "loss is nan", "Diverged"), None),
        (evidence("cuda", "the reward service said: CUDA out of memory", "ScorerFailed", "HalfstepError"), None),
        (evidence("cpu", "mat1 and mat2 shapes cannot be multiplied", "RuntimeError"), None),
        (evidence("cuda", killed_by_kernel=True, cgroup_oom_kills=1), "host"),
        (evidence("cpu", killed_by_kernel=True, peak_rss_bytes=99, host_memory_bytes=100), "host"),
        (evidence("cpu", killed_by_kernel=True, peak_rss_bytes=50, host_memory_bytes=100), None),
        (evidence("cpu", killed_by_kernel=True), None),
        (evidence("cuda", cgroup_oom_kills=1), None),
    ],
)
def test_kind_of_shortage(case: Evidence, kind: str | None) -> None:
    assert classify_shortage(case) == kind


def test_bytes_tried_and_free_are_read_from_the_message() -> None:
    assert requested_bytes(CUDA_OOM) == int(2.5 * 2**30)
    assert free_bytes(CUDA_OOM) == int(1.2 * 2**30)
    assert requested_bytes(CPU_OOM) == 67108864
    assert requested_bytes("no figures here") is None
    assert free_bytes(CPU_OOM) is None
