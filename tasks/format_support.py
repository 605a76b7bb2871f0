"""Judge for each family of devices whether bf16 and fp16 are native. Pure.

Native means that units for the format multiply it, and that torch uses them. Emulated means that it can be stored but is
multiplied in another format: torch's permissive helpers call that supported, and it costs time instead of saving it.

Sources: NVIDIA's CUDA C++ programming guide (arithmetic throughput by compute capability); pytorch issues 121957 and 195716
(fp16 without tensor cores); AMD's ROCm precision support tables (MFMA, WMMA); huggingface/transformers pull request 40458
(Apple M1 and M2 emulate bf16); pytorch issue 196074 (an Arc B580 denies bf16 units that it has); vllm-ascend issue 9294 and
candle pull request 110 (Ascend 910A has no bf16); pytorch pull request 181367 (fp16 products that oneDNN does not take).
"""

import re
from typing import NamedTuple

from tasks.machine_facts import CpuFacts, DeviceFacts
from tasks.records import FormatSupport, Support

AMD_MFMA = {"gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"}
# Turing cards that were made without tensor cores (TU116, TU117)
NO_TENSOR_CORES = re.compile(r"GTX 16\d\d|\bMX[45]50\b|\bT(4|5|6|10|12|20)00\b|\bT550\b|\bCMP 30HX\b")
INTEL_WITH_XMX = re.compile(r"Arc.* [AB]\d{2,3}\b|Arc.* 1[34]0[TV]\b|Data Center GPU (Max|Flex)|Arc.* Pro")
ASCEND_WITH_BF16 = re.compile(r"Ascend(910B\d|910_9|950)")
# a bf16 product takes this share of an fp32 product's time at most where bf16 is native: Apple's units do both at one rate
# and emulate bf16 at half of it, Intel's matrix units are several times faster and emulation is about as fast as fp32
NATIVE_TIME_SHARE = {"mps": 1.25, "xpu": 0.75}


class Formats(NamedTuple):
    """Support for both 16-bit formats on one device."""

    bf16: FormatSupport
    fp16: FormatSupport


def device_formats(device: DeviceFacts, rocm: bool) -> Formats:
    """Judge one accelerator; `rocm` tells AMD's from NVIDIA's, which torch reaches by the same name."""
    if device.api == "cuda":
        return _rocm(device.capability or "") if rocm else _cuda(device)
    return {"xpu": _xpu, "mps": _mps, "npu": _npu}[device.api](device)


def needs_timing(device: DeviceFacts) -> bool:
    """Say whether name and flags leave open if bf16 is native, so that only a measurement tells."""
    if device.api == "mps":
        return apple_generation(device.name) is None
    return device.api == "xpu" and not device.has_bf16 and not INTEL_WITH_XMX.search(device.name)


def apple_generation(name: str) -> int | None:
    """Return 2 for 'Apple M2 Pro'; None where the name does not tell."""
    match = re.search(r"\bApple M(\d+)", name)
    return int(match[1]) if match else None


def _cuda(device: DeviceFacts) -> Formats:
    capability = capability_numbers(device)
    where = f"compute capability {capability[0]}.{capability[1]}"
    bf16 = _emulated(f"{where} < 8.0: bf16 is stored but multiplied in fp32")
    fp16 = _native(f"{where} >= 7.0: fp16 tensor cores")
    if capability >= (8, 0):
        bf16 = _native(f"{where} >= 8.0: bf16 tensor cores")
    elif NO_TENSOR_CORES.search(device.name):
        slow = "cuBLAS takes about 9 times longer in fp16 than in fp32"
        fp16 = _emulated(f"{where}, but {device.name} has no tensor cores and {slow} (pytorch issue 121957)")
    elif capability in {(5, 3), (6, 0), (6, 2)}:
        gain = "torch accumulates in fp32, so fp16 saves memory, not time"
        fp16 = _native(f"{where} < 7.0: native fp16 arithmetic, but no tensor cores; {gain}")
    elif capability == (6, 1):
        fp16 = _emulated(f"{where}: fp16 instructions at 1/64 of the fp32 rate, so fp16 is multiplied in fp32")
    elif capability < (7, 0):
        fp16 = _emulated(f"{where} < 5.3: no fp16 arithmetic, fp16 is stored but multiplied in fp32")
    return Formats(bf16, fp16)


def _rocm(gfx: str) -> Formats:
    match = re.fullmatch(r"gfx(\d+)[0-9a-f]{2}", gfx)
    major = int(match[1]) if match else 0
    matrix = "MFMA" if gfx in AMD_MFMA else "WMMA" if major >= 11 else None
    if matrix:
        return Formats(_native(f"{gfx}: bf16 matrix units ({matrix})"), _native(f"{gfx}: fp16 matrix units ({matrix})"))
    bf16 = _emulated(f"{gfx or 'no gfx name'}: no bf16 units; gfx908, gfx90a, gfx94x, gfx950 and gfx11 on have them")
    if major >= 9:
        return Formats(bf16, _native(f"{gfx}: packed fp16 arithmetic at twice the fp32 rate, but no matrix units"))
    return Formats(bf16, _emulated(f"{gfx or 'no gfx name'}: fp16 is not faster than fp32 before gfx900"))


def _xpu(device: DeviceFacts) -> Formats:
    said = "has_fp16" if device.has_fp16 else "nothing against fp16, which Intel GPUs have"
    fp16 = _native(f"{device.name} reports {said}")
    if device.has_fp16 is False:
        fp16 = FormatSupport(level=Support.none, fact=f"{device.name} reports has_fp16 = false")
    if device.has_bf16:
        return Formats(_native(f"{device.name} reports bf16 conversions or matrix units"), fp16)
    if INTEL_WITH_XMX.search(device.name):
        return Formats(_native(f"{device.name} has XMX matrix units, though its driver reports no bf16 (pytorch issue 196074)"), fp16)
    return Formats(_timed(device, f"{device.name} reports no bf16 units"), fp16)


def _mps(device: DeviceFacts) -> Formats:
    fp16 = _native(f"{device.name}: Apple GPUs compute fp16 natively")
    generation = apple_generation(device.name)
    if generation is None:
        return Formats(_timed(device, f"the name {device.name!r} does not tell the chip's generation"), fp16)
    if generation >= 3:
        return Formats(_native(f"{device.name}: native bf16 from generation M3 on"), fp16)
    return Formats(_emulated(f"{device.name}: Metal computes bf16 in fp32 before generation M3"), fp16)


def _npu(device: DeviceFacts) -> Formats:
    fp16 = _native(f"{device.name}: cube units compute fp16")
    if ASCEND_WITH_BF16.match(device.name):
        return Formats(_native(f"{device.name}: cube units compute bf16 from Ascend 910B1 on"), fp16)
    return Formats(FormatSupport(level=Support.none, fact=f"{device.name}: no bf16 before Ascend 910B1"), fp16)


def cpu_formats(cpu: CpuFacts) -> Formats:
    """Judge the processor by its flags and by what torch's oneDNN takes: torch's own loops emulate the rest."""
    arm = cpu.architecture in {"aarch64", "arm64"}
    bf16 = ("bf16",) if arm else ("amx_bf16", "avx512_bf16")
    fp16 = ("asimdhp", "fp16_arith") if arm else ("amx_fp16", "avx512_fp16")
    return Formats(_cpu_format("bf16", bf16, cpu.flags, cpu.onednn_bf16), _cpu_format("fp16", fp16, cpu.flags, cpu.onednn_fp16))


def _cpu_format(label: str, units: tuple[str, ...], flags: tuple[str, ...], used: bool | None) -> FormatSupport:
    flag = next((flag for flag in units if flag in flags), None)
    if flag is None:
        return _emulated(f"no CPU flag {' or '.join(units)}: {label} is multiplied in another format")
    return _native(f"CPU flag {flag}") if used else _emulated(f"CPU flag {flag}, but this torch does not multiply {label} with it")


def capability_numbers(device: DeviceFacts) -> tuple[int, int]:
    """Return (7, 5) for the capability '7.5'; (0, 0) where there is none."""
    match = re.fullmatch(r"(\d+)\.(\d+)", device.capability or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _timed(device: DeviceFacts, unknown: str) -> FormatSupport:
    if device.matmul_seconds is None:
        return _emulated(f"{unknown}, and no measurement is at hand: taken as emulated")
    bf16, fp32 = device.matmul_seconds["bf16"], device.matmul_seconds["fp32"]
    fact = f"{unknown}; timed: a product takes {1000 * bf16:.2f} ms in bf16, {1000 * fp32:.2f} ms in fp32"
    return _native(fact) if bf16 < NATIVE_TIME_SHARE[device.api] * fp32 else _emulated(fact)


def _native(fact: str) -> FormatSupport:
    return FormatSupport(level=Support.native, fact=fact)


def _emulated(fact: str) -> FormatSupport:
    return FormatSupport(level=Support.emulated, fact=fact)
