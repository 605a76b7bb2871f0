"""The real detector as a real child process on this machine, and the tools it calls."""

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tasks.files import read_record
from tasks.hardware_support import judge
from tasks.machine_facts import DetectRequest, MachineFacts
from tasks.program_request import ask_program
from tasks.programs.detect import accelerators, driver_version, read_cpu, time_products, xpu_device
from tasks.records import Hardware, Support
from tests.machines import DECISIONS, NAMES, UNUSABLE, facts_of, hardware_of


@pytest.fixture(scope="module")
def detected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Hardware, MachineFacts]:
    """What the real detector says of this machine."""
    folder = tmp_path_factory.mktemp("detect")
    request = DetectRequest(facts_file=folder / "facts.json", hardware_file=folder / "hardware.json")
    ask_program("tasks.programs.detect", request, folder, print, timeout_seconds=120)
    return read_record(request.hardware_file, Hardware), read_record(request.facts_file, MachineFacts)


def test_detects_this_machine(detected: tuple[Hardware, MachineFacts]) -> None:
    hardware, facts = detected
    assert hardware == judge(facts)
    assert hardware.torch_version == torch.__version__
    assert 1 <= hardware.num_cpus <= len(os.sched_getaffinity(0))
    assert 0 < hardware.memory_free_bytes <= hardware.memory_total_bytes
    assert hardware.bf16.fact and hardware.fp16.fact
    if not torch.cuda.is_available():
        assert hardware.device_type == "cpu"
        assert hardware.memory_total_bytes == hardware.host_memory_bytes
        flags = Path("/proc/cpuinfo").read_text()
        assert (hardware.bf16.level is Support.native) == any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))
        assert "multiplied" in hardware.fp16.fact or "CPU flag" in hardware.fp16.fact


def test_the_detector_agrees_with_the_recording_of_this_kind_of_machine(detected: tuple[Hardware, MachineFacts]) -> None:
    """Where the model was recorded all facts of the processor agree, elsewhere what flags like these must give."""
    facts = detected[1]
    for name in NAMES:
        recorded = facts_of(name)
        if recorded.source.startswith("recorded by") and recorded.cpu.name == facts.cpu.name and recorded.cpu.flags == facts.cpu.flags:
            assert facts.cpu == recorded.cpu.model_copy(update={"num_cpus": facts.cpu.num_cpus})
            assert facts.host.source == recorded.host.source
        units = {flag for flag in facts.cpu.flags if "bf16" in flag or "fp16" in flag or flag in ("asimdhp", "fphp")}
        alike = {flag for flag in recorded.cpu.flags if "bf16" in flag or "fp16" in flag or flag in ("asimdhp", "fphp")}
        same = (recorded.cpu.architecture, recorded.cpu.onednn_bf16, alike) == (facts.cpu.architecture, facts.cpu.onednn_bf16, units)
        if same and not facts.devices and not recorded.devices and name not in UNUSABLE:
            assert (detected[0].bf16, detected[0].fp16) == (hardware_of(name).bf16, hardware_of(name).fp16)


@pytest.mark.gpu
def test_a_gpu_at_hand_is_detected(detected: tuple[Hardware, MachineFacts]) -> None:
    hardware = detected[0]
    assert hardware.device_type in ("cuda", "rocm")
    assert (hardware.bf16.level is Support.native) == torch.cuda.is_bf16_supported(including_emulation=False)
    assert hardware.driver_version


@pytest.mark.gpu
def test_the_detector_agrees_with_the_recording_of_a_gpu_of_this_kind(detected: tuple[Hardware, MachineFacts]) -> None:
    first = detected[1].devices[0]
    for name in NAMES:
        recorded = facts_of(name).devices[:1]
        if name in UNUSABLE or not recorded or recorded[0].name != first.name:
            continue
        assert first.capability == recorded[0].capability or first.name == "AMD Radeon Graphics"
        if first.capability == recorded[0].capability:
            assert first.memory_total_bytes == pytest.approx(recorded[0].memory_total_bytes, rel=0.1)
            assert (detected[0].bf16.level, detected[0].fp16.level) == (DECISIONS[name].bf16, DECISIONS[name].fp16)


@pytest.mark.skipif(torch.version.hip is not None, reason="a build for AMD asks no driver of NVIDIA's")
def test_nvidias_driver_tells_its_version_whatever_torch_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardware we lack: the management library of NVIDIA's driver, which may be missing or fail."""

    def answer(buffer: ctypes.Array[ctypes.c_char], size: int) -> int:
        buffer.value = b"560.35.03"
        return 0

    library = SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlSystemGetDriverVersion=answer)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert driver_version(None) == driver_version("cuda") == "560.35.03"
    library.nvmlInit_v2 = lambda: 9
    assert driver_version(None) is None


def test_processor_flags_are_those_that_every_core_has(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cores = [f"processor\t: {core}\nmodel name\t: Big One\nflags\t\t: fpu avx2{extra}\n" for core, extra in enumerate([" avx512_bf16", ""])]
    cpuinfo.write_text("\n".join(cores))
    cpu = read_cpu([], cpuinfo)
    assert (cpu.name, cpu.flags) == ("Big One", ("avx2",))
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd fphp asimdhp bf16 i8mm\n")
    assert set(read_cpu([], cpuinfo).flags) == {"asimd", "fphp", "asimdhp", "bf16", "i8mm"}
    assert read_cpu([], tmp_path / "missing").flags == tuple(sorted(read_cpu([], tmp_path / "missing").flags))


def test_an_integrated_gpu_may_take_what_the_host_has_free_and_a_nameless_one_is_called_by_its_gfx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardware we lack: a Jetson, whose driver counts the file cache as taken, and an AMD card without a name."""
    properties = SimpleNamespace(name="Orin", major=8, minor=7, total_memory=2**50, is_integrated=1, gcnArchName="gfx1201:xnack-")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1, 2**50))
    monkeypatch.setattr(torch.version, "hip", None)
    (orin,) = accelerators([])
    assert orin.capability == "8.7" and 2**20 < orin.memory_free_bytes < 2**50
    monkeypatch.setattr(torch.version, "hip", "7.1")
    properties.name = ""
    (card,) = accelerators([])
    assert (card.name, card.capability, card.memory_free_bytes) == ("gfx1201", "gfx1201", 1)


def test_a_gpu_that_does_not_tell_its_free_memory_is_no_end_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardware we lack: an Intel GPU whose driver cannot be asked (pytorch issue 189811)."""
    flags = {"has_bfloat16_conversions": 1, "has_subgroup_matrix_multiply_accumulate": 0, "has_fp16": 1}
    properties = SimpleNamespace(name="Intel(R) Graphics [0x7d67]", total_memory=2**34, **flags)

    def fails(index: int) -> None:
        raise RuntimeError("The device (Intel(R) Graphics [0x7d67]) doesn't support querying the available free memory.")

    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.xpu, "mem_get_info", fails)
    notes: list[str] = []
    device = xpu_device(0, notes)
    assert device.memory_free_bytes == 2**34
    assert "doesn't support querying" in notes[0]


def test_products_are_timed_in_both_formats() -> None:
    seconds = time_products("cpu", size=64, repeats=2)
    assert set(seconds) == {"fp32", "bf16"}
    assert min(seconds.values()) > 0
