"""The real detector as a real child process on this machine, and the tools it calls."""

import os
from pathlib import Path

import pytest
import torch

from tasks.files import read_record
from tasks.hardware_support import judge
from tasks.machine_facts import MachineFacts
from tasks.processes import run_program
from tasks.programs.detect import bounded_output, driver_version, read_cpu, time_products
from tasks.records import Hardware, Support


def tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_detects_this_machine(tmp_path: Path) -> None:
    out, raw = tmp_path / "hardware.json", tmp_path / "facts.json"
    ended = run_program("tasks.programs.detect", (str(out), str(raw)), tmp_path / "log", timeout_seconds=120)
    assert ended.returncode == 0, ended.log_tail
    hardware, facts = read_record(out, Hardware), read_record(raw, MachineFacts)
    assert hardware == judge(facts)
    assert hardware.torch_version == torch.__version__
    assert hardware.num_cpus == len(os.sched_getaffinity(0))
    assert 0 < hardware.memory_free_bytes <= hardware.memory_total_bytes
    assert hardware.bf16.fact and hardware.fp16.fact
    if not torch.cuda.is_available():
        assert hardware.device_type == "cpu"
        assert hardware.memory_total_bytes == hardware.host_memory_bytes
        flags = Path("/proc/cpuinfo").read_text()
        assert (hardware.bf16.level is Support.native) == any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))
        assert "multiplied" in hardware.fp16.fact or "CPU flag" in hardware.fp16.fact


def test_wrong_arguments_are_one_message_and_exit_2(tmp_path: Path) -> None:
    ended = run_program("tasks.programs.detect", (), tmp_path / "log", timeout_seconds=120)
    assert ended.returncode == 2
    assert ended.log_tail == "expected OUT.json [FACTS.json], found 0 arguments"


@pytest.mark.gpu
def test_a_gpu_at_hand_is_detected(tmp_path: Path) -> None:
    out = tmp_path / "hardware.json"
    run_program("tasks.programs.detect", (str(out),), tmp_path / "log", timeout_seconds=120)
    hardware = read_record(out, Hardware)
    assert hardware.device_type in ("cuda", "rocm")
    assert (hardware.bf16.level is Support.native) == torch.cuda.is_bf16_supported(including_emulation=False)
    assert hardware.driver_version


def test_a_tool_that_is_missing_fails_or_hangs_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    assert bounded_output((str(tmp_path / "nvidia-smi"),), notes) is None
    tool(tmp_path / "fails", "nvidia-smi", "echo 'Driver/library version mismatch'; exit 18")
    assert bounded_output((str(tmp_path / "fails" / "nvidia-smi"),), notes) is None
    tool(tmp_path / "hangs", "nvidia-smi", "exec sleep 600")
    assert bounded_output((str(tmp_path / "hangs" / "nvidia-smi"),), notes, seconds=0.2) is None
    assert "could not be run: No such file" in notes[0]
    assert "failed with exit code 18: Driver/library version mismatch" in notes[1]
    assert "did not answer within 0.2 s" in notes[2]
    if not torch.version.hip:
        tool(tmp_path / "works", "nvidia-smi", "printf '560.35.03\\n560.35.03\\n'")
        monkeypatch.setenv("PATH", f"{tmp_path / 'works'}:{os.environ['PATH']}")
        assert driver_version([], notes) == "560.35.03"


def test_processor_flags_are_those_that_every_core_has(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cores = [f"processor\t: {core}\nmodel name\t: Big One\nflags\t\t: fpu avx2{extra}\n" for core, extra in enumerate([" avx512_bf16", ""])]
    cpuinfo.write_text("\n".join(cores))
    cpu = read_cpu(cpuinfo)
    assert (cpu.name, cpu.flags) == ("Big One", ("avx2",))
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd fphp asimdhp bf16 i8mm\n")
    assert set(read_cpu(cpuinfo).flags) == {"asimd", "fphp", "asimdhp", "bf16", "i8mm"}
    assert read_cpu(tmp_path / "missing").flags == tuple(sorted(read_cpu(tmp_path / "missing").flags))


def test_products_are_timed_in_both_formats() -> None:
    seconds = time_products("cpu", size=64, repeats=2)
    assert set(seconds) == {"fp32", "bf16"}
    assert min(seconds.values()) > 0
