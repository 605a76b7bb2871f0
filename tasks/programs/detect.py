"""Detect what this machine offers a training run.

Launch: ``python -m tasks.programs.detect REQUEST.json`` (a DetectRequest; ``result.json`` is written beside it)

Reads torch, /proc, the cgroup limits and, where there is one, NVIDIA's driver. Writes the raw facts, which are a recorded
machine, and the `Hardware` record that they are judged to be.
Free device memory counts what others hold, and the few hundred MB of this process's own context on the device.
"""

import contextlib
import ctypes
import os
import platform
import re
import timeit
import warnings
from pathlib import Path

import torch

from tasks.files import write_record
from tasks.format_support import needs_timing
from tasks.hardware_support import judge
from tasks.host_memory import read_host_memory, usable_cpus
from tasks.machine_facts import CpuFacts, DetectRequest, DeviceFacts, MachineFacts
from tasks.memory import MB
from tasks.programs import lifecycle

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
VISIBILITY_VARIABLES = (*_VISIBLE, "ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK")
# flags of units that multiply; the rest says nothing about precision
ARITHMETIC_FLAG = re.compile(r"avx|amx|fma|f16c|bf16|fp16|fphp|asimd|sve|sme(?!p)|neon|i8mm")


def detect(request: DetectRequest) -> None:
    """Write the facts, then what they are judged to be; RefusedInput: the torch build has no kernels for a device."""
    facts = collect()
    write_record(request.facts_file, facts)
    write_record(request.hardware_file, judge(facts))


def collect() -> MachineFacts:
    """Read every fact that the judgement rests on; what could not be read becomes a note."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        devices = accelerators(notes)
        claims = bool(torch.cuda.is_bf16_supported()) if torch.version.cuda or torch.version.hip else None
    notes += [f"torch warns: {str(warning.message).strip().splitlines()[0]}" for warning in caught if warning.category is UserWarning]
    timed = [item.model_copy(update={"matmul_seconds": time_products(item.api)}) if needs_timing(item) else item for item in devices]
    return MachineFacts(
        source=f"tasks.programs.detect on {platform.platform()}",
        torch_version=torch.__version__,
        cuda_version=torch.version.cuda,
        hip_version=torch.version.hip,
        torch_arches=tuple(torch.cuda.get_arch_list()),
        torch_claims_bf16=claims,
        devices=tuple(timed),
        visibility={name: os.environ[name] for name in VISIBILITY_VARIABLES if name in os.environ},
        driver_version=driver_version(devices[0].api if devices else None),
        cpu=read_cpu(notes),
        host=read_host_memory(),
        notes=tuple(dict.fromkeys(notes)),
    )


def accelerators(notes: list[str]) -> list[DeviceFacts]:
    """Read the devices of the first kind that torch finds; torch loads torch_npu by itself where it is installed."""
    for api, read in {"cuda": cuda_device, "xpu": xpu_device, "npu": npu_device, "mps": mps_device}.items():
        module = getattr(torch, api, None)
        if module is not None and module.is_available():
            return [read(index, notes) for index in range(module.device_count())]
    return []


def cuda_device(index: int, notes: list[str]) -> DeviceFacts:
    """Read a device that torch.cuda sees, NVIDIA's or, on a ROCm build, AMD's."""
    properties = torch.cuda.get_device_properties(index)
    total = properties.total_memory
    free = _free_bytes("cuda", index, 0, notes)
    if properties.is_integrated and not torch.version.hip:
        # the driver counts the host's file cache as taken, though the kernel gives it up
        free = max(free, min(read_host_memory().free_bytes, total))
    gfx = properties.gcnArchName.split(":")[0] if torch.version.hip else None
    name, capability = properties.name or str(gfx), gfx or f"{properties.major}.{properties.minor}"
    return DeviceFacts(api="cuda", name=name, capability=capability, memory_total_bytes=total, memory_free_bytes=free)


def xpu_device(index: int, notes: list[str]) -> DeviceFacts:
    """Read an Intel GPU. The flags of some drivers deny units that are there; the judgement knows."""
    properties = torch.xpu.get_device_properties(index)
    return DeviceFacts(
        api="xpu",
        name=properties.name,
        memory_total_bytes=properties.total_memory,
        memory_free_bytes=_free_bytes("xpu", index, properties.total_memory, notes),
        has_bf16=bool(properties.has_bfloat16_conversions or properties.has_subgroup_matrix_multiply_accumulate),
        has_fp16=bool(properties.has_fp16),
    )


def _free_bytes(api: str, index: int, otherwise: int, notes: list[str]) -> int:
    try:
        return int(getattr(torch, api).mem_get_info(index)[0])
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        notes.append(f"free memory of device {index} could not be read, counted as {otherwise // MB} MB: {reason}")
        return otherwise


def npu_device(index: int, notes: list[str]) -> DeviceFacts:
    """Read an Ascend device."""
    notes.append("the driver version of an Ascend device is not read")
    free, total = torch.npu.mem_get_info(index)
    return DeviceFacts(api="npu", name=torch.npu.get_device_name(index), memory_total_bytes=total, memory_free_bytes=free)


def mps_device(index: int, notes: list[str]) -> DeviceFacts:
    """Read an Apple GPU; its memory is the share of the host's that Metal recommends."""
    recommended = torch.mps.recommended_max_memory()
    notes.append("memory that other processes hold on an Apple GPU cannot be read: all that Metal recommends counts as free")
    return DeviceFacts(api="mps", name=torch.backends.mps.get_name(), memory_total_bytes=recommended, memory_free_bytes=recommended)


def time_products(device: str, size: int = 2048, repeats: int = 10) -> dict[str, float]:
    """Return seconds of one square product by format, the best of several, after a warm-up."""
    seconds = {}
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        times = timeit.repeat("(matrix @ matrix).sum().item()", globals={"matrix": matrix}, number=1, repeat=repeats + 1)
        seconds[name] = min(times[1:])
    return seconds


def driver_version(api: str | None) -> str | None:
    """Return the GPU driver's version, None where there is no driver or it does not tell."""
    if api == "xpu":
        return str(torch.xpu.get_device_properties(0).driver_version)
    if api == "mps":
        return platform.mac_ver()[0]
    if torch.version.hip:
        amd = Path("/sys/module/amdgpu/version")
        return amd.read_text().strip() if amd.is_file() else None
    with contextlib.suppress(OSError):
        # the driver's own library, which answers in containers and under WSL too
        nvml, version = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.create_string_buffer(80)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(version, len(version)) == 0:
            return version.value.decode()
    return None


def read_cpu(notes: list[str], cpuinfo: Path = Path("/proc/cpuinfo")) -> CpuFacts:
    """Read name and flags of the processor; where the kernel lists no flags, torch's own view of them."""
    capabilities = torch.cpu.get_capabilities()
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    fields = [tuple(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line]
    flags = [set(value.split()) for key, value in fields if key in ("flags", "Features")]
    found = set.intersection(*flags) if flags else {name for name, value in capabilities.items() if value is True}
    onednn = torch.ops.mkldnn if torch.backends.mkldnn.is_available() else None
    return CpuFacts(
        name=next((value for key, value in fields if key == "model name"), None) or capabilities.get("cpu_name") or platform.machine(),
        architecture=platform.machine(),
        flags=tuple(sorted(flag for flag in found if ARITHMETIC_FLAG.search(flag))),
        num_cpus=usable_cpus(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, notes),
        onednn_bf16=bool(onednn._is_mkldnn_bf16_supported()) if onednn else None,
        onednn_fp16=bool(onednn._is_mkldnn_fp16_supported()) if onednn else None,
    )


if __name__ == "__main__":
    raise SystemExit(lifecycle.main(DetectRequest, detect, __doc__))
