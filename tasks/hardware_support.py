"""Judge a machine: raw facts in, `Hardware` out. Pure: no torch, no device, no files.

A torch build for CUDA or ROCm that finds no device means the CPU. Of several visible devices the weaker one decides.
"""

import re
from typing import NamedTuple

from tasks.errors import RefusedInput
from tasks.format_support import capability_numbers, cpu_formats, device_formats
from tasks.machine_facts import DeviceFacts, MachineFacts
from tasks.memory import MB
from tasks.records import DeviceType, FormatSupport, Hardware, Support

STRENGTH = {Support.none: 0, Support.emulated: 1, Support.native: 2}


class _Chosen(NamedTuple):
    device_type: DeviceType
    device_name: str
    compute_capability: str | None
    memory_total_bytes: int
    memory_free_bytes: int
    bf16: FormatSupport
    fp16: FormatSupport
    notes: tuple[str, ...]


def judge(facts: MachineFacts) -> Hardware:
    """Decide what a machine computes natively; of several devices the weaker one decides.

    Raises:
        RefusedInput: the torch build has no kernels for a visible device.
    """
    chosen = _accelerator(facts) if facts.devices else _processor(facts)
    return Hardware(
        **chosen._asdict() | {"notes": (*chosen.notes, *facts.host.notes, *facts.notes)},
        device_count=max(1, len(facts.devices)),
        host_memory_bytes=facts.host.usable_bytes,
        host_memory_fact=facts.host.fact,
        driver_version=facts.driver_version,
        torch_version=facts.torch_version,
        num_cpus=facts.cpu.num_cpus,
    )


def _processor(facts: MachineFacts) -> _Chosen:
    build = f"ROCm {facts.hip_version}" if facts.hip_version else f"CUDA {facts.cuda_version}" if facts.cuda_version else None
    notes = []
    if build:
        hidden = "".join(f" ({name}={value!r})" for name, value in facts.visibility.items())
        notes.append(f"torch is built for {build} but finds no device{hidden}: the CPU is used")
    elif facts.driver_version:
        notes.append(f"a GPU driver answers ({facts.driver_version}), but torch {facts.torch_version} is built without it: the CPU is used")
    return _Chosen("cpu", facts.cpu.name, None, facts.host.usable_bytes, facts.host.free_bytes, *cpu_formats(facts.cpu), tuple(notes))


def _accelerator(facts: MachineFacts) -> _Chosen:
    rocm = facts.hip_version is not None
    for device in facts.devices:
        _check_kernels(device, facts)
    judged = [(device, device_formats(device, rocm)) for device in facts.devices]
    weakest, _ = min(
        judged, key=lambda pair: (*(STRENGTH[support.level] for support in pair[1]), capability_numbers(pair[0]), _free(pair[0]))
    )
    tightest = min(facts.devices, key=_free)
    bf16, fp16 = (min(found, key=lambda support: STRENGTH[support.level]) for found in zip(*(pair[1] for pair in judged), strict=True))
    device_type: DeviceType = "rocm" if weakest.api == "cuda" and rocm else weakest.api
    notes = _device_notes(facts, weakest, tightest)
    return _Chosen(device_type, weakest.name, weakest.capability, tightest.memory_total_bytes, _free(tightest), bf16, fp16, notes)


def _device_notes(facts: MachineFacts, weakest: DeviceFacts, tightest: DeviceFacts) -> tuple[str, ...]:
    notes = [f"{name}={value!r} leaves {len(facts.devices)} device(s)" for name, value in facts.visibility.items()]
    names = [device.name for device in facts.devices]
    if len(set(names)) > 1:
        notes.append(f"unlike devices ({', '.join(names)}): what is decided holds for the weakest, {weakest.name}")
    if len({_free(device) // MB for device in facts.devices}) > 1:
        notes.append(f"free memory is that of the fullest of {len(names)} devices, {_free(tightest) // MB} MB")
    if _free(tightest) < 0.9 * tightest.memory_total_bytes:
        held = (tightest.memory_total_bytes - _free(tightest)) // MB
        notes.append(f"{held} MB of {tightest.memory_total_bytes // MB} MB on {tightest.name} are held by others or reserved")
    return tuple(notes)


def _check_kernels(device: DeviceFacts, facts: MachineFacts) -> None:
    # NVIDIA's machine code runs on the same major architecture with an equal or higher minor one, PTX ("compute_") on any
    # later one; AMD's on the architecture it names only, or on a family ("gfx11-generic")
    capability = capability_numbers(device)
    found = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(facts.torch_arches))
    built = [(kind, (int(major), int(minor))) for kind, major, minor in found]
    fits = any(arch <= capability and (kind == "compute" or arch[0] == capability[0]) for kind, arch in built)
    if facts.hip_version:
        fits = any(arch.split(":")[0] == device.capability or "generic" in arch for arch in facts.torch_arches)
    if device.api == "cuda" and facts.torch_arches and not fits:
        raise RefusedInput(
            f"{device.name} has compute capability {device.capability}, but torch {facts.torch_version} has kernels for "
            f"{', '.join(facts.torch_arches)} only; install a torch build for it, or hide it with CUDA_VISIBLE_DEVICES=''"
        )


def _free(device: DeviceFacts) -> int:
    # integrated GPUs may report more free than total
    return min(device.memory_free_bytes, device.memory_total_bytes)
