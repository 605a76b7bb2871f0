"""Detect the hardware in a child process, so that neither torch nor a device context stays in the flow's process."""

import tempfile
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.files import read_record
from tasks.host_memory import read_host_memory
from tasks.machine_facts import DetectRequest
from tasks.program_request import ask_program
from tasks.records import Hardware

TIMEOUT_SECONDS = 120.0


def free_memory(hardware: Hardware) -> int:
    """Return the bytes that are free on `hardware` now; a child process asks an accelerator, which takes seconds."""
    if hardware.device_type == "cpu":
        return read_host_memory().free_bytes
    with tempfile.TemporaryDirectory() as folder:
        return _detect(Path(folder), Path(folder, "hardware.json")).memory_free_bytes


@task(cache_policy=NO_CACHE)
def detect_hardware(run_dir: Path) -> Hardware:
    """Detect what this machine offers and keep it as ``hardware.json`` in `run_dir`, with the facts as ``detect/facts.json``."""
    hardware = _detect(run_dir.resolve() / "detect", run_dir.resolve() / "hardware.json")
    logger = get_run_logger()
    logger.info("%s, bf16: %s, %s", hardware.device_name, hardware.bf16.level, hardware.bf16.fact)
    logger.info("%s, fp16: %s, %s", hardware.device_name, hardware.fp16.level, hardware.fp16.fact)
    for note in hardware.notes:
        logger.info("hardware: %s", note)
    return hardware


def _detect(work_dir: Path, path: Path) -> Hardware:
    request = DetectRequest(facts_file=work_dir / "facts.json", hardware_file=path)
    ask_program("tasks.programs.detect", request, work_dir, lambda line: None, TIMEOUT_SECONDS)
    return read_record(path, Hardware)
