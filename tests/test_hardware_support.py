"""Recorded machines, judged: every row of decisions.yaml, and cases H1 to H6."""

import json

import pytest

from tasks.errors import RefusedInput
from tasks.format_support import needs_timing
from tasks.hardware_support import judge
from tasks.machine_facts import MachineFacts
from tasks.records import FormatSupport, Hardware, Support
from tests.machines import DECISIONS, FIXTURES, NAMES, UNUSABLE, facts_of, hardware_of

GB = 2**30


def with_device(base: str, name: str, capability: str | None = None, **changes: object) -> Hardware:
    facts = facts_of(base)
    device = facts.devices[0].model_copy(update={"name": name, "capability": capability, **changes})
    return judge(facts.model_copy(update={"devices": (device,), "torch_arches": ()}))


def levels(hardware: Hardware) -> tuple[str, str]:
    return hardware.bf16.level.value, hardware.fp16.level.value


def test_every_recorded_machine_has_a_row_and_every_row_a_machine() -> None:
    assert set(NAMES) == set(DECISIONS)
    assert len(NAMES) >= 44


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_machine_is_decided_right(name: str) -> None:
    decision = DECISIONS[name]
    if decision.refused:
        with pytest.raises(RefusedInput, match=decision.refused.replace(".", r"\.")):
            hardware_of(name)
        return
    hardware = hardware_of(name)
    assert (hardware.device_type, hardware.bf16.level, hardware.fp16.level) == (decision.device, decision.bf16, decision.fp16)
    assert hardware.bf16.fact and hardware.fp16.fact


@pytest.mark.parametrize("name", [name for name, decision in DECISIONS.items() if decision.measured])
def test_what_is_called_native_is_no_slower_than_fp32_and_what_is_called_emulated_no_faster(name: str) -> None:
    """Hold the table against public measurements of torch's own products."""
    measured = DECISIONS[name].measured or {}
    for label, level in (("bf16", DECISIONS[name].bf16), ("fp16", DECISIONS[name].fp16)):
        share = measured[label] / measured["fp32"]
        assert share > 0.9 if level is Support.native else share < 1.1, f"{label} runs at {share:.2f} times the fp32 rate"


@pytest.mark.parametrize("name", NAMES)
def test_recorded_machine_names_its_source_and_survives_json(name: str) -> None:
    facts = facts_of(name)
    assert "https://github.com/" in facts.source or "torch/cuda/__init__.py" in facts.source
    assert "assumed" in facts.source
    assert MachineFacts.model_validate(json.loads(facts.model_dump_json())) == facts
    assert (FIXTURES / f"{name}.json").stat().st_size < 3000


def test_h1_the_fact_overrules_torchs_permissive_helper() -> None:
    for name in ("tesla_t4", "tesla_v100", "tesla_p100"):
        assert facts_of(name).torch_claims_bf16
        assert "< 8.0" in hardware_of(name).bf16.fact


def test_h1_p100_says_that_it_has_no_tensor_cores() -> None:
    assert "no tensor cores" in hardware_of("tesla_p100").fp16.fact
    assert "no tensor cores" not in hardware_of("tesla_v100").fp16.fact


@pytest.mark.parametrize(
    ("base", "name", "capability", "expected", "word"),
    [
        ("tesla_t4", "NVIDIA GeForce MX450", "7.5", ("emulated", "emulated"), "no tensor cores"),
        ("tesla_t4", "NVIDIA Tegra X2", "6.2", ("emulated", "native"), "no tensor cores"),
        ("tesla_t4", "NVIDIA GeForce MX570", "8.6", ("native", "native"), "tensor cores"),
        ("mi300x", "Radeon RX 580 Series", "gfx803", ("emulated", "emulated"), "not faster"),
        ("mi300x", "AMD Radeon Graphics", "gfx90c", ("emulated", "native"), "packed"),
        ("mi300x", "AMD Radeon RX 5700 XT", "gfx1010", ("emulated", "native"), "packed"),
        ("mi300x", "AMD", None, ("emulated", "emulated"), "no gfx name"),
        ("arc_b580", "Intel(R) Arc(TM) 140V GPU (16GB)", None, ("native", "native"), "has_fp16"),
        ("apple_m2", "Apple M10 Ultra", None, ("native", "native"), "natively"),
    ],
)
def test_devices_without_a_recording(base: str, name: str, capability: str | None, expected: tuple[str, str], word: str) -> None:
    hardware = with_device(base, name, capability)
    assert levels(hardware) == expected
    assert word in hardware.fp16.fact


@pytest.mark.parametrize(
    ("base", "name", "share", "bf16"),
    [
        ("apple_m2", "Apple processor", 1.0, "native"),
        ("apple_m2", "Apple processor", 1.7, "emulated"),
        ("arc_b580", "Intel(R) Arc(TM) Graphics", 0.3, "native"),
        ("arc_b580", "Intel(R) Arc(TM) Graphics", 0.95, "emulated"),
    ],
)
def test_h3_where_the_name_does_not_tell_bf16_is_timed(base: str, name: str, share: float, bf16: str) -> None:
    hardware = with_device(base, name, matmul_seconds={"fp32": 1.0, "bf16": share})
    assert levels(hardware)[0] == bf16
    assert "timed" in hardware.bf16.fact
    untimed = with_device(base, name)
    assert untimed.bf16.level is Support.emulated and "no measurement is at hand" in untimed.bf16.fact


def test_h3_only_what_name_and_flags_leave_open_is_timed() -> None:
    def needs(base: str, **changes: object) -> bool:
        return needs_timing(facts_of(base).devices[0].model_copy(update=changes))

    timed = {name for name in NAMES for device in facts_of(name).devices if device.matmul_seconds}
    assert timed == {name for name in NAMES if any(needs_timing(device) for device in facts_of(name).devices)}
    assert needs("apple_m2", name="Apple processor")
    assert not needs("arc_graphics_155h", has_bf16=True)


def test_units_that_this_torch_does_not_use_do_not_count() -> None:
    def cpu(name: str, **changes: object) -> tuple[FormatSupport, FormatSupport]:
        facts = facts_of(name)
        hardware = judge(facts.model_copy(update={"cpu": facts.cpu.model_copy(update=changes)}))
        return hardware.bf16, hardware.fp16

    assert cpu("cpu_xeon_8488c", onednn_fp16=False)[1].fact == "CPU flag avx512_fp16, but this torch does not multiply fp16 with it"
    assert [support.level for support in cpu("cpu_xeon_8488c", onednn_bf16=None, onednn_fp16=None)] == [Support.emulated] * 2
    assert "asimdhp, but" in cpu("cpu_graviton2")[1].fact
    assert cpu("cpu_graviton2", onednn_fp16=True)[1].level is Support.native


def test_h2_a_gpu_build_without_a_gpu_is_a_cpu_and_says_so() -> None:
    assert any("ROCm" in note and "no device" in note for note in hardware_of("rocm_build_no_gpu").notes)
    hidden = facts_of("tesla_t4").model_copy(update={"devices": (), "visibility": {"CUDA_VISIBLE_DEVICES": ""}})
    assert judge(hidden).device_type == "cpu"
    assert any("CUDA_VISIBLE_DEVICES=''" in note for note in judge(hidden).notes)
    cpu_build = facts_of("cpu_epyc_9r14").model_copy(update={"driver_version": "560.35.03"})
    assert any("560.35.03" in note for note in judge(cpu_build).notes)


def test_h4_a_container_limit_below_the_hosts_memory_counts() -> None:
    hardware = hardware_of("cpu_xeon_6252n_container")
    assert hardware.host_memory_bytes == hardware.memory_total_bytes == 16 * GB
    assert hardware.memory_free_bytes == 13 * GB
    assert "memory.limit_in_bytes" in hardware.host_memory_fact
    assert hardware_of("h100_mig_2g").host_memory_bytes == 64 * GB
    assert "memory.max" in hardware_of("l40s_pod").host_memory_fact


def test_h4_a_cpu_quota_counts_and_is_said() -> None:
    assert hardware_of("cpu_pod_quota_v2").num_cpus == 4
    assert any("cpu.max leaves 4 of 12 CPUs" in note for note in hardware_of("cpu_pod_quota_v2").notes)
    assert any("cpu.cfs_quota_us leaves 7 of 96 CPUs" in note for note in hardware_of("runpod_a40_quota").notes)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNUSABLE and facts_of(name).devices])
def test_h5_free_memory_counts_and_the_fullest_device_decides(name: str) -> None:
    hardware, devices = hardware_of(name), facts_of(name).devices
    assert hardware.memory_free_bytes == min(device.memory_free_bytes for device in devices)
    fullest = min(devices, key=lambda device: device.memory_free_bytes)
    assert hardware.memory_total_bytes == fullest.memory_total_bytes
    held = fullest.memory_free_bytes < 0.9 * fullest.memory_total_bytes
    assert any("held by others" in note for note in hardware.notes) == held


def test_h5_half_full_cards_are_among_the_recorded_machines() -> None:
    for name in ("a800_half_full", "a100_mig_2g_half_full", "unlike_rtx_3060_and_full_4090"):
        hardware = hardware_of(name)
        assert hardware.memory_free_bytes < 0.6 * hardware.memory_total_bytes


def test_h6_of_two_unlike_devices_the_weaker_decides() -> None:
    hardware = hardware_of("unlike_rtx_2080_and_k20m")
    assert (hardware.device_name, hardware.compute_capability, hardware.device_count) == ("Tesla K20m", "3.5", 2)
    assert "< 5.3" in hardware.fp16.fact
    assert any("unlike devices (GeForce RTX 2080, Tesla K20m)" in note for note in hardware.notes)
    left = hardware_of("unlike_rtx_2080_left_visible")
    assert (left.device_name, left.fp16.level) == ("GeForce RTX 2080", Support.native)
    assert any("CUDA_VISIBLE_DEVICES='0' leaves 1" in note for note in left.notes)


def test_h6_the_weaker_decides_each_format_whatever_the_order() -> None:
    t4, a100 = facts_of("tesla_t4").devices[0], facts_of("a100_80gb_pcie").devices[0]
    for devices in ((t4, a100), (a100, t4)):
        hardware = judge(facts_of("tesla_t4").model_copy(update={"devices": devices}))
        assert (hardware.device_name, levels(hardware)) == ("Tesla T4", ("emulated", "native"))


def test_a_torch_build_without_kernels_for_the_device_is_refused_with_the_remedy() -> None:
    with pytest.raises(RefusedInput, match=r"Tesla P100.*6\.0.*2\.10\.0\+cu128.*sm_70.*train on the CPU with CUDA_VISIBLE_DEVICES=$"):
        hardware_of("tesla_p100_kernels_missing")
    facts = facts_of("tesla_t4")
    judge(facts.model_copy(update={"torch_arches": ("sm_70",)}))
    judge(facts.model_copy(update={"torch_arches": ("sm_50", "compute_50")}))
    with pytest.raises(RefusedInput):
        judge(facts.model_copy(update={"torch_arches": ("sm_80", "compute_80")}))
    mi25 = facts_of("mi25")
    judge(mi25.model_copy(update={"torch_arches": ("gfx900:xnack-",)}))
    judge(mi25.model_copy(update={"torch_arches": ("gfx9-generic",)}))
    with pytest.raises(RefusedInput, match="gfx900, but torch"):
        judge(mi25.model_copy(update={"torch_arches": ("gfx90a", "gfx1100")}))


def test_of_unlike_devices_the_fact_is_that_of_the_device_it_names() -> None:
    for name, chosen, capability in (
        ("unlike_rtx_3060_and_full_4090", "RTX 3060", "8.6"),
        ("unlike_rtx_2080_and_k20m", "K20m", "3.5"),
    ):
        hardware = hardware_of(name)
        assert chosen in hardware.device_name
        assert capability in hardware.bf16.fact and capability in hardware.fp16.fact


def test_a_device_without_kernels_is_hidden_and_the_others_are_kept() -> None:
    with pytest.raises(RefusedInput, match=r"CUDA_VISIBLE_DEVICES=\d+(,\d+)*$"):
        hardware_of("unlike_5090_4090_3090_kernels_missing")
