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
    _check_kernels(facts)
    judged = [(device, device_formats(device, rocm)) for device in facts.devices]
    weakest, formats = min(
        judged, key=lambda pair: (*(STRENGTH[support.level] for support in pair[1]), capability_numbers(pair[0]), _free(pair[0]))
    )
    tightest = min(facts.devices, key=_free)
    # the weakest in bf16, which comes first, need not be the weakest in fp16
    (bf16, fp16), (other, its) = formats, min(judged, key=lambda pair: STRENGTH[pair[1].fp16.level])
    if STRENGTH[its.fp16.level] < STRENGTH[fp16.level]:
        fp16 = FormatSupport(level=its.fp16.level, fact=f"{other.name}: {its.fp16.fact}")
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


def _check_kernels(facts: MachineFacts) -> None:
    usable = [index for index, device in enumerate(facts.devices) if _has_kernels(device, facts)]
    lacking = next((device for index, device in enumerate(facts.devices) if index not in usable), None)
    if lacking:
        keep = f"leave the others visible with CUDA_VISIBLE_DEVICES={','.join(map(str, usable))}"
        raise RefusedInput(
            f"{lacking.name} has compute capability {lacking.capability}, but torch {facts.torch_version} has kernels for "
            f"{', '.join(facts.torch_arches)} only; install a torch build for it, or "
            f"{keep if usable else 'train on the CPU with CUDA_VISIBLE_DEVICES='}"
        )


def _has_kernels(device: DeviceFacts, facts: MachineFacts) -> bool:
    # NVIDIA's machine code runs on the same major architecture with an equal or higher minor one, PTX ("compute_") on any
    # later one; AMD's on the architecture it names only, or on a family ("gfx11-generic")
    capability = capability_numbers(device)
    found = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(facts.torch_arches))
    built = [(kind, (int(major), int(minor))) for kind, major, minor in found]
    fits = any(arch <= capability and (kind == "compute" or arch[0] == capability[0]) for kind, arch in built)
    if facts.hip_version:
        fits = any(arch.split(":")[0] == device.capability or "generic" in arch for arch in facts.torch_arches)
    return fits or device.api != "cuda" or not facts.torch_arches


def _free(device: DeviceFacts) -> int:
    # integrated GPUs may report more free than total
    return min(device.memory_free_bytes, device.memory_total_bytes)
