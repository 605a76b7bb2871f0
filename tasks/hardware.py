"""Detect the hardware in a child process, so that neither torch nor a device context stays in the flow's process."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from pydantic import ValidationError

from tasks.errors import ProgramFailed
from tasks.files import read_record
from tasks.processes import run_program
from tasks.records import Hardware

PROGRAM = "tasks.programs.detect"
TIMEOUT_SECONDS = 120.0


@task(cache_policy=NO_CACHE)
def detect_hardware(run_dir: Path) -> Hardware:
    """Detect what this machine offers and keep it as ``hardware.json`` in `run_dir`.

    Raises:
        ProgramFailed: the program ended, or was stopped after 120 s, without a result.
    """
    path = (run_dir / "hardware.json").resolve()
    path.unlink(missing_ok=True)
    ended = run_program(PROGRAM, (str(path),), run_dir / "detect.log", timeout_seconds=TIMEOUT_SECONDS)
    how = f"was stopped after {TIMEOUT_SECONDS:g} s" if ended.timed_out else f"ended with exit code {ended.returncode}"
    try:
        hardware = read_record(path, Hardware)
    except (FileNotFoundError, ValidationError) as error:
        raise ProgramFailed(
            f"the hardware could not be detected: python -m {PROGRAM} {how} without a usable {path.name} ({type(error).__name__}); "
            f"run it by hand to see more. The end of its log:\n{ended.log_tail}"
        ) from error
    logger = get_run_logger()
    logger.info("%s, bf16: %s, %s", hardware.device_name, hardware.bf16.level, hardware.bf16.fact)
    logger.info("%s, fp16: %s, %s", hardware.device_name, hardware.fp16.level, hardware.fp16.fact)
    for note in hardware.notes:
        logger.info("hardware: %s", note)
    return hardware
