"""Judge a machine: raw facts in, `Hardware` out. Pure: no torch, no device, no files.

A torch build for CUDA or ROCm that finds no device means the CPU. Of several visible devices the weaker one decides.
"""

import re

from tasks.errors import RefusedInput
from tasks.format_support import capability_numbers, cpu_formats, device_formats
from tasks.machine_facts import DeviceFacts, MachineFacts
from tasks.memory import MB
from tasks.records import FormatSupport, Hardware, Support

STRENGTH = {Support.none: 0, Support.emulated: 1, Support.native: 2}


def judge(facts: MachineFacts) -> Hardware:
    """Decide what a machine computes natively; without a device the processor is what is judged.

    Raises:
        RefusedInput: the torch build has no kernels for a visible device.
    """
    _check_kernels(facts)
    rocm = facts.hip_version is not None
    judged = [(device, device_formats(device, rocm)) for device in facts.devices] or [(_processor(facts), cpu_formats(facts.cpu))]
    weakest, (bf16, fp16) = min(
        judged, key=lambda pair: (*(STRENGTH[support.level] for support in pair[1]), capability_numbers(pair[0]), _free(pair[0]))
    )
    # the weakest in bf16, which comes first, need not be the weakest in fp16
    other, its = min(judged, key=lambda pair: STRENGTH[pair[1].fp16.level])
    if STRENGTH[its.fp16.level] < STRENGTH[fp16.level]:
        fp16 = FormatSupport(level=its.fp16.level, fact=f"{other.name}: {its.fp16.fact}")
    tightest = min((device for device, _ in judged), key=_free)
    notes = _device_notes(facts, weakest, tightest) if facts.devices else _processor_notes(facts)
    return Hardware(
        device_type="rocm" if weakest.api == "cuda" and rocm else weakest.api,
        device_name=weakest.name,
        device_count=len(judged),
        compute_capability=weakest.capability,
        memory_total_bytes=tightest.memory_total_bytes,
        memory_free_bytes=_free(tightest),
        host_memory_bytes=facts.host.usable_bytes,
        host_memory_fact=facts.host.fact,
        bf16=bf16,
        fp16=fp16,
        driver_version=facts.driver_version,
        torch_version=facts.torch_version,
        num_cpus=facts.cpu.num_cpus,
        notes=(*notes, *facts.host.notes, *facts.notes),
    )


def _processor(facts: MachineFacts) -> DeviceFacts:
    memory = facts.host
    return DeviceFacts(api="cpu", name=facts.cpu.name, memory_total_bytes=memory.usable_bytes, memory_free_bytes=memory.free_bytes)


def _processor_notes(facts: MachineFacts) -> list[str]:
    build = f"ROCm {facts.hip_version}" if facts.hip_version else f"CUDA {facts.cuda_version}" if facts.cuda_version else None
    if build:
        hidden = "".join(f" ({name}={value!r})" for name, value in facts.visibility.items())
        return [f"torch is built for {build} but finds no device{hidden}: the CPU is used"]
    if facts.driver_version:
        return [f"a GPU driver answers ({facts.driver_version}), but torch {facts.torch_version} is built without it: the CPU is used"]
    return []


def _device_notes(facts: MachineFacts, weakest: DeviceFacts, tightest: DeviceFacts) -> list[str]:
    notes = [f"{name}={value!r} leaves {len(facts.devices)} device(s)" for name, value in facts.visibility.items()]
    names = [device.name for device in facts.devices]
    if len(set(names)) > 1:
        notes.append(f"unlike devices ({', '.join(names)}): what is decided holds for the weakest, {weakest.name}")
    if len({_free(device) // MB for device in facts.devices}) > 1:
        notes.append(f"free memory is that of the fullest of {len(names)} devices, {_free(tightest) // MB} MB")
    if _free(tightest) < 0.9 * tightest.memory_total_bytes:
        held = (tightest.memory_total_bytes - _free(tightest)) // MB
        notes.append(f"{held} MB of {tightest.memory_total_bytes // MB} MB on {tightest.name} are held by others or reserved")
    return notes


def _check_kernels(facts: MachineFacts) -> None:
    usable = [index for index, device in enumerate(facts.devices) if _has_kernels(device, facts)]
    if lacking := next((device for index, device in enumerate(facts.devices) if index not in usable), None):
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
