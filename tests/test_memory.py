"""Which failures are a shortage of memory, and of which memory. Messages are real ones; each names where it was published."""

import pytest

from tasks.errors import ScorerFailed
from tasks.memory import Evidence, classify_shortage, evidence_of, free_bytes, is_fragmented, last_words, requested_bytes

MB, GB = 2**20, 2**30
CPU_OOM = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 67108864 bytes. "
    "Error code 12 (Cannot allocate memory)"
)
# torch's words, figures of ours
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1.20 GiB is free. "
    "Of the allocated memory 12.00 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."
)
# kaito-project/kaito#976; pytorch/pytorch#138002
FRAGMENTED = (
    "CUDA out of memory. Tried to allocate 546.00 MiB. GPU 0 has a total capacity of 15.77 GiB of which 514.19 MiB is free. "
    "Process 562167 has 15.25 GiB memory in use. Of the allocated memory 13.73 GiB is allocated by PyTorch, with 46.00 MiB allocated "
    "in private pools (e.g., CUDA Graphs), and 736.86 MiB is reserved by PyTorch but unallocated."
)
HIP_FRAGMENTED = (
    "HIP out of memory. Tried to allocate 6.64 GiB. GPU 0 has a total capacity of 19.92 GiB of which 6.22 GiB is free. "
    "Of the allocated memory 5.34 GiB is allocated by PyTorch, and 7.10 GiB is reserved by PyTorch but unallocated."
)
# pytorch/pytorch#59778: text of torch 1.x
OLD_CUDA = (
    "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already allocated; "
    "3.03 GiB free; 1.24 GiB reserved in total by PyTorch)"
)
# ROCm/TheRock#2118: under torch's per-process fraction, as memory.budget_mb sets it
HIP_FRACTION = (
    "HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 GiB of which 244.65 GiB is free. "
    "1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by PyTorch, with 17.00 MiB allocated in private pools, "
    "and 54.99 MiB is reserved by PyTorch but unallocated."
)
# ROCm/TheRock#1054
HIP_OOM = (
    "HIP out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 15.24 GiB of which 15.09 GiB is free. "
    "Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
)
# intel/torch-xpu-ops#1324
XPU_OOM = (
    "XPU out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 16.50 GiB. Of the allocated memory 16.50 GiB is "
    "allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. Please use `empty_cache` to release all unoccupied memory."
)
# Comfy-Org/ComfyUI#7440; pinokiocomputer/pinokio#941
MPS_OOM = (
    "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: 27.20 GiB). "
    "Tried to allocate 292.50 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit"
)
MPS_SMALL = (
    "MPS backend out of memory (MPS allocated: 16.00 GB, other allocations: 3.31 GB, max allowed: 18.13 GB). "
    "Tried to allocate 256 bytes on shared pool."
)
# sgl-project/sglang#29838; xingchensong/TouchNet#100
NPU_OOM = (
    "NPU out of memory. Tried to allocate 72.00 MiB (NPU 0; 61.27 GiB total capacity; 56.05 GiB already allocated; "
    "56.05 GiB current active; 5.04 MiB free; 58.39 GiB reserved in total by PyTorch)"
)
NPU_FRAGMENTED = (
    "NPU out of memory. Tried to allocate 5.03 GiB (NPU 3; 60.96 GiB total capacity; 49.47 GiB already allocated; "
    "49.47 GiB current active; 1.32 GiB free; 57.55 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory"
)
# JettHu/ComfyUI_TGate#10: cudaMallocAsync; the limit is set by memory.budget_mb alone, and is the largest number otherwise
CUDA_ASYNC = (
    "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 13.74 GiB\n"
    "Requested               : 640.00 MiB\nDevice limit            : 14.75 GiB\nFree (according to CUDA): 27.06 MiB\n"
    "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB"
)
# size of an attention's products; 0 is another fault (a macOS of its own)
METAL_BUFFER = "MPSCommandBufferImageCache.mm:1420: failed assertion `Failed to allocate private MTLBuffer for size 9964830976'"
# cms-sw/cmssw#46624, with much free
HSA = (
    "Callback: Queue 0x14878b400000 Aborting with error : HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary "
    "resources. This error may also occur when the core runtime library needs to spawn threads. Code: 0x1008 Available Free mem : 62084 MB"
)
# vllm-project/vllm#20305
VLLM_FULL = "Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization (0.95, 45.01 GiB)."
CUDNN = "cuDNN error: CUDNN_STATUS_"
# the words alone, from the enumerations of NVIDIA's, AMD's and Intel's documentation, where no report of them was at hand
DEVICE_TEXTS = (
    CUDA_OOM,
    HIP_OOM,
    XPU_OOM,
    MPS_OOM,
    MPS_SMALL,
    NPU_OOM,
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",  # Wan2GP#1083, an AcceleratorError
    CUDA_ASYNC,
    "RuntimeError: Triton Error [CUDA]: out of memory",  # pytorch/helion#711 and the source of Triton's launchers
    "RuntimeError: Triton Error [HIP]:  Code: 2, Messsage: out of memory",  # as they write it
    "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY: out of memory; total memory reported: 11996954624",  # XLA, CuPy, ffmpeg
    "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCTensorRandom.cu:25",  # rowanz/neural-motifs#58
    METAL_BUFFER,
    "CUDA driver error: out of memory",  # torch, c10/cuda/driver_api
    "HIP error: out of memory",  # torch on ROCm
    "cudaErrorMemoryAllocation",
    "HIP runtime error: hipErrorOutOfMemory",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please report a bug',  # pytorch#112377, MIG
    'NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":8',  # pytorch#130486
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",  # QwenLM/Qwen3#873
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "HIPSPARSE_STATUS_ALLOC_FAILED",  # ROCm/rocm-libraries#2801
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling `cusparseSpMM`",
    "cuFFT error: CUFFT_ALLOC_FAILED",  # cupy/cupy#1063
    f"{CUDNN}ALLOC_FAILED",  # amdegroot/ssd.pytorch#33
    f"{CUDNN}INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "rocblas_status_memory_error",
    "miopenStatusAllocFailed",
    "MIOpen Error: /data/repo/MIOpen/src/hip/handlehip.cpp:70: Memory not available to allocate buffer: 655360000",  # ROCm/MIOpen#47
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",  # NVIDIA/nccl#1235
    "include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",  # NVIDIA/nccl#1235
    "Error out of memory at line 380 in file /home/leilichuan/bitsandbytes/csrc/pythonInterface.c",  # bitsandbytes#726
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",  # physical-ai-studio#440
    "UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",  # intel/torch-xpu-ops#2445
    "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "error: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",  # ggml-org/llama.cpp#9701
    "Invalid buffer size: 19.45 GB",  # pytorch#141909
    "NPU function error: error code is 207001\nEL0004: [PID: 316198] 2025-09-28 Failed to allocate memory.",  # vllm-ascend#3141
    "Memory_Allocation_Failure(EL0004): Failed to allocate memory.",  # hw-native-sys/PTOAS#341
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",  # vLLM
    VLLM_FULL,
    "free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization",  # pytorch#175666
    "4.5 GiB KV cache is needed, which is larger than the available KV cache memory (2.1 GiB)",  # vLLM
)
HOST_TEXTS = (
    CPU_OOM,
    "[enforce fail at alloc_cpu.cpp:81] DefaultCPUAllocator: not enough memory: you tried to allocate 1073741824 bytes",  # diffusers#787
    "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",  # ROCm/MIOpen#494
    "unable to mmap 23802932552 bytes from file <./flux1-dev.safetensors>: Cannot allocate memory (12)",  # safetensors#528
    "[Errno 12] Cannot allocate memory",
    "memory allocation of 1179664 bytes failed",  # huggingface/tokenizers#1748
    "malloc of size 1073741824 failed",  # Arrow
    "mkl_malloc: failed to allocate memory",  # SYSTRAN/faster-whisper#390
    "libgomp: Out of memory allocating 8512 bytes",  # ANL-CESAR/XSBench#1
    "Unable to allocate 32.0 GiB for an array with shape (2048, 2048, 2048, 4) and data type uint8",  # a-person-mask-generator#87
    "ray::Worker.step() (pid=7106)\nMemoryError",
    "level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)",
    f"{CUDNN}INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
)
AMBIGUOUS_TEXTS = (
    "could not create a primitive",
    "could not create a primitive descriptor for the matmul primitive",
    "could not execute a primitive",
    HSA,
    "can't start new thread",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "Unable to find a valid cuDNN algorithm to run convolution",
)
NO_SHORTAGE = (
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: too many resources requested for launch",
    "CUDA-capable device(s) is/are busy or unavailable",
    "CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376",  # Triton: on-chip memory
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "failed assertion `Failed to allocate private MTLBuffer for size 0'",
    "could not create a memory descriptor from blob",
    "[Errno 28] No space left on device",
    "DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory",
    "tcmalloc: large alloc 1073741824 bytes == 0x55d0",
    "cannot read /sys/fs/cgroup/memory.max: the cgroup is gone",
    "mat1 and mat2 shapes cannot be multiplied",
    "the reward model's answer was: sorry, I am out of memory",
    "index out of range in self",
)


def evidence(device_type: str, message: str = "", *types: str, **more: object) -> Evidence:
    return Evidence.model_validate({"device_type": device_type, "message": message, "error_types": types, **more})


@pytest.mark.parametrize("text", DEVICE_TEXTS)
def test_what_devices_and_their_libraries_say_is_a_shortage_of_the_device(text: str) -> None:
    assert classify_shortage(evidence("cuda", text, "RuntimeError")) == "device"
    # no accelerator is in use there: it is somebody else's words
    assert classify_shortage(evidence("cpu", text, "RuntimeError")) is None


@pytest.mark.parametrize("text", HOST_TEXTS)
def test_what_allocators_of_the_host_say_is_a_shortage_of_the_host_or_of_a_cpu(text: str) -> None:
    assert classify_shortage(evidence("cuda", text, "RuntimeError")) == "host"
    assert classify_shortage(evidence("cpu", text, "RuntimeError")) == "device"


@pytest.mark.parametrize("text", AMBIGUOUS_TEXTS)
def test_an_ambiguous_text_counts_only_where_next_to_nothing_was_left(text: str) -> None:
    for available, kind in ((MB, "device"), (GB, None), (None, None)):
        assert classify_shortage(evidence("cpu", text, "RuntimeError", available_bytes=available)) == kind


@pytest.mark.parametrize("text", NO_SHORTAGE)
def test_false_friends(text: str) -> None:
    for device in ("cuda", "cpu"):
        assert classify_shortage(evidence(device, text, "RuntimeError", available_bytes=0)) is None


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (evidence("cuda", "", "OutOfMemoryError", "RuntimeError"), "device"),
        # oneDNN computes on the host or on the device; what is created is memory
        (evidence("xpu", "could not create a memory object"), "device"),
        (evidence("cpu", "could not create a memory object"), "device"),
        (evidence("rocm", HSA.replace("62084", "12")), "device"),
        (evidence("rocm", HSA), None),
        (evidence("cuda", "", "MemoryError", "Exception"), "host"),
        (evidence("cpu", "", "MemoryError", "Exception"), "device"),
        (evidence("cpu", "loss is nan", "Diverged"), None),
        (evidence("cuda", CUDA_OOM, "ScorerFailed", "HalfstepError", "OutOfMemoryError"), None),
        (evidence("cuda", FRAGMENTED, "OutOfMemoryError"), "fragmentation"),
        (evidence("rocm", HIP_FRAGMENTED, "OutOfMemoryError"), "fragmentation"),
        (evidence("npu", NPU_FRAGMENTED, "RuntimeError"), "fragmentation"),
        (evidence("cuda", killed_by_kernel=True, cgroup_oom_kills=1), "host"),
        (evidence("cpu", killed_by_kernel=True, peak_rss_bytes=99, host_memory_bytes=100), "host"),
        (evidence("cpu", killed_by_kernel=True, peak_rss_bytes=50, host_memory_bytes=100), None),
        (evidence("cpu", killed_by_kernel=True), None),
        (evidence("cuda", cgroup_oom_kills=1), None),
    ],
)
def test_kind_of_shortage_by_type_and_evidence(case: Evidence, kind: str | None) -> None:
    assert classify_shortage(case) == kind


@pytest.mark.parametrize(
    ("text", "requested", "free"),
    [
        (CUDA_OOM, 2.5 * GB, 1.2 * GB),
        (OLD_CUDA, 2.26 * GB, 3.03 * GB),
        (HIP_OOM, 16 * GB, 15.09 * GB),
        # the limit set on the process, not the device, is what it met
        (HIP_FRACTION, 2 * MB, 1.05 * GB - 1017.01 * MB - 54.99 * MB),
        (XPU_OOM, 512 * MB, None),
        (MPS_OOM, 292.5 * MB, (27.20 - 9.57 - 17.35) * GB),
        (MPS_SMALL, 256, 0),
        (NPU_OOM, 72 * MB, 5.04 * MB),
        (VLLM_FULL, 45.01 * GB, 31.44 * GB),
        (CPU_OOM, 67108864, None),
        ("Invalid buffer size: 19.45 GB", 19.45 * GB, None),
        ("Unable to allocate 275. GiB for an array with shape (1181055, 250396, 1)", 275 * GB, None),
        ("memory allocation of 1179664 bytes failed", 1179664, None),
        ("NCCL WARN Failed to CUDA calloc 6291456 bytes", 6291456, None),
        ("CUDA out of memory. Tried to allocate more than 1EB memory", None, None),  # NVIDIA/nccl#1284
        (CUDA_ASYNC, 640 * MB, 27.06 * MB),
        (CUDA_ASYNC.replace("17179869184.00", "13.75"), 640 * MB, 0.01 * GB),
        (METAL_BUFFER, 9964830976, None),
        ("libgomp: Out of memory allocating 8512 bytes", 8512, None),
        ("no figures here", None, None),
    ],
)
def test_bytes_tried_and_free_are_read_from_the_message(text: str, requested: float | None, free: float | None) -> None:
    assert requested_bytes(text) == (None if requested is None else pytest.approx(requested, abs=1))
    assert free_bytes(text) == (None if free is None else pytest.approx(free, abs=4))


FATAL = "Fatal Python error: "
STEPS = "".join(f"step {number}: reward 0.5\n" for number in range(1, 9))
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    main()\n'
WARNING = "[W] cuMemAlloc: CUDA error: out of memory, trying again with less\n"


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        (f"{STEPS}{TRACEBACK}RuntimeError: CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`\n", "device"),
        (f"{STEPS}terminate called after throwing an instance of 'c10::Error'\n  what():  {CUDA_OOM}\nframe #0: c10::Error\n", "device"),
        (f"terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n{FATAL}Aborted\n", "host"),
        (f"{STEPS}/AppleInternal/MPSCore/{METAL_BUFFER}\nresource_tracker: There appear to be 1 leaked semaphore objects", "device"),
        (f"{STEPS}{WARNING}", "device"),
        (f"{WARNING}{STEPS}", None),
        (f"{WARNING}{STEPS}{FATAL}Segmentation fault\n", None),
        (f"{WARNING}{FATAL}Segmentation fault\n\nCurrent thread (most recent call first):\n  File 'train.py'\n", None),
        (f"{WARNING}{TRACEBACK}ValueError: no such column\n", None),
        (f"{TRACEBACK}RuntimeError: {CUDA_OOM}\n{STEPS}", None),
        (f"{TRACEBACK}RuntimeError: {CUDA_OOM}\nand then\n{TRACEBACK}ImportError: no module\n", None),
        ("", None),
    ],
)
def test_a_log_tells_of_a_shortage_only_by_what_it_ends_with(log: str, kind: str | None) -> None:
    assert classify_shortage(evidence("cuda", last_words(log))) == kind


def test_little_that_lies_unused_is_no_fragmentation() -> None:
    asked_little = CUDA_OOM.replace("2.50 GiB", "20.00 MiB")
    assert not is_fragmented(asked_little)
    assert is_fragmented(asked_little.replace("300.00 MiB is reserved", "900.00 MiB is reserved"))
    assert not is_fragmented(NPU_OOM)


class OutOfMemoryError(RuntimeError):
    """Bears torch's name."""


def raised(error: BaseException, cause: BaseException | None = None, context: BaseException | None = None) -> BaseException:
    error.__context__ = context
    if cause:
        error.__cause__ = cause
    return error


def test_a_wrapped_shortage_is_seen_with_any_number_of_arguments() -> None:
    oom = OutOfMemoryError(CUDA_OOM, 2)
    for error in (
        oom,
        raised(RuntimeError("the rollout failed", 7), cause=oom),
        raised(KeyError("while cleaning up"), context=oom),
        ExceptionGroup("several", [ValueError("no"), ExceptionGroup("inner", [oom])]),
    ):
        seen = evidence_of(error, "cuda", None)
        assert classify_shortage(seen) == "device", error
        assert requested_bytes(seen.message) == int(2.5 * GB)
    assert seen.message.startswith("several") and "caused by" in seen.message


def test_what_was_handled_or_a_scorer_raised_is_no_cause() -> None:
    oom = OutOfMemoryError(CUDA_OOM)
    handled = raised(ValueError("no such column"), context=oom)
    handled.__suppress_context__ = True
    assert classify_shortage(evidence_of(handled, "cuda", None)) is None
    assert classify_shortage(evidence_of(raised(ScorerFailed("row 3"), cause=oom), "cuda", None)) is None
    assert (
        classify_shortage(evidence_of(raised(RuntimeError("wrapped"), cause=raised(ScorerFailed("row 3"), cause=oom)), "cuda", 0)) is None
    )


def test_causes_in_a_ring_are_followed_once() -> None:
    ring = ValueError("a ring")
    assert evidence_of(raised(ring, cause=raised(TypeError("b"), cause=ring)), "cpu", None).message == "a ring\ncaused by b"
