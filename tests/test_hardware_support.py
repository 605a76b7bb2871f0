"""Recorded machines, judged: cases H1 to H6."""

import json

import pytest

from tasks.errors import RefusedInput
from tasks.format_support import needs_timing
from tasks.hardware_support import judge
from tasks.machine_facts import CpuFacts, DeviceFacts, MachineFacts
from tasks.records import Hardware, Support
from tests.machines import FIXTURES, NAMES, facts_of, hardware_of

GB = 2**30


def with_device(base: str, name: str, capability: str | None = None, **changes: object) -> Hardware:
    facts = facts_of(base)
    device = facts.devices[0].model_copy(update={"name": name, "capability": capability, **changes})
    return judge(facts.model_copy(update={"devices": (device,), "torch_arches": ()}))


def levels(hardware: Hardware) -> tuple[str, str]:
    return hardware.bf16.level.value, hardware.fp16.level.value


@pytest.mark.parametrize(
    ("name", "device_type", "bf16", "fp16"),
    [
        ("tesla_t4", "cuda", "emulated", "native"),
        ("tesla_v100", "cuda", "emulated", "native"),
        ("tesla_p100", "cuda", "emulated", "native"),
        ("a800_half_full", "cuda", "native", "native"),
        ("h100_mig_2g", "cuda", "native", "native"),
        ("mi300x", "rocm", "native", "native"),
        ("rocm_build_no_gpu", "cpu", "native", "emulated"),
        ("apple_m2", "mps", "emulated", "native"),
        ("arc_b580", "xpu", "native", "native"),
        ("cpu_epyc_9r14", "cpu", "native", "emulated"),
        ("cpu_xeon_8488c", "cpu", "native", "native"),
        ("cpu_xeon_6252n_container", "cpu", "emulated", "emulated"),
    ],
)
def test_recorded_machine(name: str, device_type: str, bf16: str, fp16: str) -> None:
    hardware = hardware_of(name)
    assert hardware.device_type == device_type
    assert levels(hardware) == (bf16, fp16)
    assert hardware.bf16.fact and hardware.fp16.fact


@pytest.mark.parametrize("name", NAMES)
def test_recorded_machine_names_its_source_and_survives_json(name: str) -> None:
    facts = facts_of(name)
    assert "https://github.com/" in facts.source or "torch/cuda/__init__.py" in facts.source
    assert MachineFacts.model_validate(json.loads(facts.model_dump_json())) == facts
    assert (FIXTURES / f"{name}.json").stat().st_size < 3000


def test_the_fact_overrules_torchs_permissive_helper() -> None:
    for name in ("tesla_t4", "tesla_v100", "tesla_p100"):
        assert facts_of(name).torch_claims_bf16
        assert "< 8.0" in hardware_of(name).bf16.fact


def test_p100_says_that_it_has_no_tensor_cores() -> None:
    assert "no tensor cores" in hardware_of("tesla_p100").fp16.fact
    assert "no tensor cores" not in hardware_of("tesla_v100").fp16.fact


@pytest.mark.parametrize(
    ("name", "capability", "bf16", "fp16", "word"),
    [
        ("NVIDIA GeForce GTX 1080 Ti", "6.1", "emulated", "emulated", "1/64"),
        ("NVIDIA GeForce GTX 1660 SUPER", "7.5", "emulated", "native", "no tensor cores"),
        ("NVIDIA GeForce RTX 2080 Ti", "7.5", "emulated", "native", "tensor cores"),
        ("NVIDIA GeForce GTX 980", "5.2", "emulated", "emulated", "no fp16 arithmetic"),
        ("NVIDIA GeForce RTX 4090", "8.9", "native", "native", "tensor cores"),
        ("NVIDIA B200", "10.0", "native", "native", "tensor cores"),
        ("NVIDIA GeForce RTX 5090", "12.0", "native", "native", "tensor cores"),
    ],
)
def test_cuda_by_capability_and_name(name: str, capability: str, bf16: str, fp16: str, word: str) -> None:
    hardware = with_device("tesla_t4", name, capability)
    assert levels(hardware) == (bf16, fp16)
    assert word in hardware.fp16.fact


@pytest.mark.parametrize(
    ("gfx", "bf16", "fp16"),
    [
        ("gfx900", "emulated", "native"),
        ("gfx906", "emulated", "native"),
        ("gfx908", "native", "native"),
        ("gfx90a", "native", "native"),
        ("gfx90c", "emulated", "native"),
        ("gfx950", "native", "native"),
        ("gfx1030", "emulated", "native"),
        ("gfx1100", "native", "native"),
        ("gfx1201", "native", "native"),
        (None, "emulated", "emulated"),
    ],
)
def test_rocm_by_gfx_name(gfx: str | None, bf16: str, fp16: str) -> None:
    assert levels(with_device("mi300x", "AMD", gfx)) == (bf16, fp16)


@pytest.mark.parametrize(
    ("chip", "bf16"), [("M1", "emulated"), ("M2 Ultra", "emulated"), ("M3", "native"), ("M4 Max", "native"), ("M10", "native")]
)
def test_apple_generations_are_told_apart(chip: str, bf16: str) -> None:
    assert levels(with_device("apple_m2", f"Apple {chip}")) == (bf16, "native")


@pytest.mark.parametrize(("seconds", "bf16"), [(0.5, "native"), (1.0, "emulated"), (2.0, "emulated")])
def test_an_unknown_chip_is_timed(seconds: float, bf16: str) -> None:
    unknown = {"name": "Apple processor", "matmul_seconds": {"fp32": 1.0, "bf16": seconds}}
    hardware = with_device("apple_m2", **unknown)
    assert levels(hardware)[0] == bf16
    assert "does not tell" in hardware.bf16.fact and "timed" in hardware.bf16.fact


def test_only_what_name_and_flags_leave_open_is_timed() -> None:
    def needs(base: str, **changes: object) -> bool:
        return needs_timing(facts_of(base).devices[0].model_copy(update=changes))

    assert not any(needs_timing(device) for name in NAMES for device in facts_of(name).devices)
    assert needs("apple_m2", name="Apple processor")
    assert needs("arc_b580", name="Intel(R) Arc(TM) Graphics")
    assert not needs("arc_b580", name="Intel(R) Arc(TM) Graphics", has_bf16=True)


@pytest.mark.parametrize(
    ("soc", "bf16"), [("Ascend910B3", "native"), ("Ascend910_9392", "native"), ("Ascend910B", "none"), ("Ascend310P3", "none")]
)
def test_ascend_by_soc_name(soc: str, bf16: str) -> None:
    assert levels(with_device("apple_m2", soc, api="npu")) == (bf16, "native")


@pytest.mark.parametrize(
    ("flags", "bf16", "fp16"),
    [(("asimdhp", "bf16", "fphp"), "native", "native"), (("asimdhp", "fphp"), "emulated", "native"), (("asimd",), "emulated", "emulated")],
)
def test_arm_processors(flags: tuple[str, ...], bf16: str, fp16: str) -> None:
    cpu = CpuFacts(name="Neoverse", architecture="aarch64", flags=flags, num_cpus=4, onednn_fp16=False)
    assert levels(judge(facts_of("cpu_epyc_9r14").model_copy(update={"cpu": cpu}))) == (bf16, fp16)


def test_fp16_units_that_torch_does_not_use_do_not_count() -> None:
    facts = facts_of("cpu_xeon_8488c")
    hardware = judge(facts.model_copy(update={"cpu": facts.cpu.model_copy(update={"onednn_fp16": False})}))
    assert hardware.fp16.level is Support.emulated
    assert "oneDNN does not use it" in hardware.fp16.fact


def test_a_gpu_build_without_a_gpu_is_a_cpu_and_says_so() -> None:
    assert any("ROCm" in note and "no device" in note for note in hardware_of("rocm_build_no_gpu").notes)
    hidden = facts_of("tesla_t4").model_copy(update={"devices": (), "visibility": {"CUDA_VISIBLE_DEVICES": ""}})
    assert judge(hidden).device_type == "cpu"
    assert any("CUDA_VISIBLE_DEVICES=''" in note for note in judge(hidden).notes)
    cpu_build = facts_of("cpu_epyc_9r14").model_copy(update={"driver_version": "560.35.03"})
    assert any("560.35.03" in note for note in judge(cpu_build).notes)


def test_a_container_limit_below_the_hosts_memory_counts() -> None:
    hardware = hardware_of("cpu_xeon_6252n_container")
    assert hardware.host_memory_bytes == hardware.memory_total_bytes == 16 * GB
    assert hardware.memory_free_bytes == 13 * GB
    assert "memory.limit_in_bytes" in hardware.host_memory_fact
    assert hardware_of("h100_mig_2g").host_memory_bytes == 64 * GB


def test_free_memory_counts_and_the_fullest_device_decides() -> None:
    hardware = hardware_of("a800_half_full")
    fullest = facts_of("a800_half_full").devices[1]
    assert hardware.memory_free_bytes == fullest.memory_free_bytes < 0.6 * hardware.memory_total_bytes
    assert any("held by others" in note for note in hardware.notes)


def test_of_two_unlike_devices_the_weaker_decides() -> None:
    a100 = DeviceFacts(api="cuda", name="NVIDIA A100", capability="8.0", memory_total_bytes=80 * GB, memory_free_bytes=10 * GB)
    t4 = facts_of("tesla_t4").devices[0]
    both = facts_of("tesla_t4").model_copy(update={"devices": (a100, t4)})
    hardware = judge(both)
    assert (hardware.device_name, hardware.compute_capability, hardware.device_count) == ("Tesla T4", "7.5", 2)
    assert levels(hardware) == ("emulated", "native")
    assert hardware.memory_free_bytes == 10 * GB
    assert any("unlike devices" in note for note in hardware.notes)
    left = judge(both.model_copy(update={"devices": (a100,), "visibility": {"CUDA_VISIBLE_DEVICES": "0"}}))
    assert levels(left) == ("native", "native")
    assert any("CUDA_VISIBLE_DEVICES='0' leaves 1" in note for note in left.notes)


def test_a_torch_build_without_kernels_for_the_device_is_refused_with_the_remedy() -> None:
    with pytest.raises(RefusedInput, match=r"Tesla P100.*6\.0.*2\.10\.0\+cu128.*sm_70.*CUDA_VISIBLE_DEVICES=''"):
        hardware_of("tesla_p100_kernels_missing")
    facts = facts_of("tesla_t4")
    judge(facts.model_copy(update={"torch_arches": ("sm_70",)}))
    judge(facts.model_copy(update={"torch_arches": ("sm_50", "compute_50")}))
    with pytest.raises(RefusedInput):
        judge(facts.model_copy(update={"torch_arches": ("sm_80", "compute_80")}))
