"""Detect what this machine offers a training run.

Launch: ``python -m tasks.programs.detect OUT.json [FACTS.json]``

Reads torch, /proc, the cgroup limits and, where there is one, nvidia-smi (bounded in time). Writes a `Hardware` record to
OUT.json and, if asked, the raw facts that it was judged from to FACTS.json: a recorded machine.
Free device memory counts what others hold, and the few hundred MB of this process's own context on the device.
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch

from tasks.files import write_record
from tasks.format_support import needs_timing
from tasks.hardware_support import judge
from tasks.host_memory import read_host_memory, usable_cpus
from tasks.machine_facts import CpuFacts, DeviceFacts, MachineFacts
from tasks.programs import lifecycle

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
VISIBILITY_VARIABLES = (*_VISIBLE, "ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK")
# flags of units that multiply; the rest says nothing about precision
ARITHMETIC_FLAG = re.compile(r"avx|amx|fma|f16c|bf16|fp16|fphp|asimd|sve|sme(?!p)|neon|i8mm")
TOOL_SECONDS = 10.0


def main(arguments: list[str]) -> int:
    """Write the record and return the exit code."""
    lifecycle.start()
    if len(arguments) not in (1, 2):
        print(f"expected OUT.json [FACTS.json], found {len(arguments)} arguments", file=sys.stderr)
        return 2
    return lifecycle.run_reported(lambda: detect(*map(Path, arguments)))


def detect(out_path: Path, facts_path: Path | None = None) -> None:
    """Write what this machine offers and, if asked, the facts; RefusedInput: the torch build has no kernels for a device."""
    facts = collect()
    if facts_path:
        write_record(facts_path, facts)
    write_record(out_path, judge(facts))


def collect() -> MachineFacts:
    """Read every fact that the judgement rests on; what could not be read becomes a note."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        devices = cuda_devices(notes) or xpu_devices(notes) or npu_devices(notes) or mps_devices(notes)
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
        driver_version=driver_version(devices, notes),
        cpu=read_cpu(notes),
        host=read_host_memory(),
        notes=tuple(notes),
    )


def cuda_devices(notes: list[str]) -> list[DeviceFacts]:
    """Read the devices that torch.cuda sees, NVIDIA's and, on a ROCm build, AMD's."""
    if not torch.cuda.is_available():
        return []
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        total = properties.total_memory
        try:
            free = torch.cuda.mem_get_info(index)[0]
        except RuntimeError as error:
            notes.append(f"free memory of device {index} could not be read, counted as 0: {str(error).splitlines()[0]}")
            free = 0
        if properties.is_integrated and not torch.version.hip:
            # the driver counts the host's file cache as taken, though the kernel gives it up
            free = max(free, min(read_host_memory().free_bytes, total))
        gfx = properties.gcnArchName.split(":")[0] if torch.version.hip else None
        name, capability = properties.name or str(gfx), gfx or f"{properties.major}.{properties.minor}"
        devices.append(DeviceFacts(api="cuda", name=name, capability=capability, memory_total_bytes=total, memory_free_bytes=free))
    return devices


def xpu_devices(notes: list[str]) -> list[DeviceFacts]:
    """Read Intel GPUs. The flags of some drivers deny units that are there; the judgement knows."""
    if not torch.xpu.is_available():
        return []
    devices = []
    for index in range(torch.xpu.device_count()):
        properties = torch.xpu.get_device_properties(index)
        total = properties.total_memory
        try:
            free = torch.xpu.mem_get_info(index)[0]
        except RuntimeError as error:
            notes.append(f"free memory of device {index} cannot be read, all of it counts as free: {str(error).splitlines()[0]}")
            free = total
        flags = (properties.has_bfloat16_conversions, properties.has_subgroup_matrix_multiply_accumulate)
        bf16, fp16 = any(map(bool, flags)), bool(properties.has_fp16)
        devices.append(
            DeviceFacts(api="xpu", name=properties.name, memory_total_bytes=total, memory_free_bytes=free, has_bf16=bf16, has_fp16=fp16)
        )
    return devices


def npu_devices(notes: list[str]) -> list[DeviceFacts]:
    """Read Ascend devices; torch loads torch_npu by itself where it is installed."""
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return []
    notes.append("the driver version of an Ascend device is not read")
    devices = [(npu.get_device_name(index), *npu.mem_get_info(index)) for index in range(npu.device_count())]
    return [DeviceFacts(api="npu", name=name, memory_total_bytes=total, memory_free_bytes=free) for name, free, total in devices]


def mps_devices(notes: list[str]) -> list[DeviceFacts]:
    """Read an Apple GPU; its memory is the share of the host's that Metal recommends."""
    if not torch.backends.mps.is_available():
        return []
    name = bounded_output(("sysctl", "-n", "machdep.cpu.brand_string"), notes) or "Apple, chip unknown"
    recommended = torch.mps.recommended_max_memory()
    notes.append("memory that other processes hold on an Apple GPU cannot be read: all that Metal recommends counts as free")
    return [DeviceFacts(api="mps", name=name, memory_total_bytes=recommended, memory_free_bytes=recommended)]


def time_products(device: str, size: int = 2048, repeats: int = 10) -> dict[str, float]:
    """Return seconds of one square product by format, the best of several, after a warm-up."""
    seconds = {}
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        times = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            (matrix @ matrix).sum().item()
            times.append(time.perf_counter() - started)
        seconds[name] = min(times[1:])
    return seconds


def driver_version(devices: list[DeviceFacts], notes: list[str]) -> str | None:
    """Return the GPU driver's version; a tool that is missing, fails or hangs is noted."""
    if devices and devices[0].api == "xpu":
        return str(torch.xpu.get_device_properties(0).driver_version)
    if devices and devices[0].api == "mps":
        return platform.mac_ver()[0]
    amd = Path("/sys/module/amdgpu/version")
    if torch.version.hip:
        return amd.read_text().strip() if amd.is_file() else None
    if shutil.which("nvidia-smi") is None and not (devices and devices[0].api == "cuda"):
        return None
    answer = bounded_output(("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"), notes)
    return answer.splitlines()[0] if answer else None


def bounded_output(command: tuple[str, ...], notes: list[str], seconds: float = TOOL_SECONDS) -> str | None:
    """Return what a tool prints, or None with a note if it is missing, fails or takes longer than `seconds`."""
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        notes.append(f"{command[0]} could not be run: {error.strerror}")
        return None
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        # a process stuck in the driver does not die at once: it is left behind rather than waited for
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1.0)
        notes.append(f"{command[0]} did not answer within {seconds:g} s")
        return None
    if child.returncode:
        notes.append(f"{command[0]} failed with exit code {child.returncode}: {output.strip().splitlines()[0] if output.strip() else ''}")
        return None
    return output.strip()


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
    raise SystemExit(main(sys.argv[1:]))
