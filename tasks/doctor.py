"""Say what this machine offers a run and what is missing: ``python -m tasks.doctor`` (``make doctor``)."""

import os
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prefect.logging import disable_run_logger

from tasks.errors import HalfstepError
from tasks.hardware import detect_hardware
from tasks.memory import MB
from tasks.places import HOME_DIR, PROJECT_DIR

PACKAGES = ("torch", "transformers", "accelerate", "trl", "datasets", "reasoning-gym", "prefect", "mlflow", "dvc", "pydantic")
# two training states are kept while a third is written (fp32 weights and AdamW's states: 12 bytes a parameter),
# and the checkpoint (4 bytes a parameter) lies in the run folder before it moves to the store
NEEDED_DISK_BYTES = 135_000_000 * (3 * 12 + 2 * 4)


def main() -> int:
    """Print one line a check; return 1 if any of them stops a run."""
    free = shutil.disk_usage(HOME_DIR).free
    built = ", ".join(sorted(path.parent.name for path in PROJECT_DIR.glob("data/base_models/*/manifest.json")))
    checks = [
        (True, f"Python {sys.version.split()[0]}"),
        *map(_package, PACKAGES),
        *((_writable(HOME_DIR / name), f"write access to {name}/ in {HOME_DIR}") for name in ("runs", "state")),
        (free >= NEEDED_DISK_BYTES, f"{free / MB:,.0f} MB of disk free, a SmolLM2-135M run needs {NEEDED_DISK_BYTES / MB:,.0f} MB"),
        (True, f"base models built: {built}" if built else "no base model built yet; make data builds it"),
        _device(),
    ]
    for good, text in checks:
        print(("  ok    " if good else "  FAIL  ") + text)
    bad = sum(not good for good, _ in checks)
    print(f"{bad} of {len(checks)} checks failed" if bad else "all is ready: make retrain")
    return 1 if bad else 0


def _package(name: str) -> tuple[bool, str]:
    try:
        return True, f"{name} {version(name)}"
    except PackageNotFoundError:
        return False, f"{name} is not installed; run make install"


def _writable(folder: Path) -> bool:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


def _device() -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder, disable_run_logger():
        try:
            found = detect_hardware.fn(Path(folder))
        except HalfstepError as error:
            return False, str(error)
    formats = f"bf16 {found.bf16.level} ({found.bf16.fact}), fp16 {found.fp16.level} ({found.fp16.fact})"
    return True, f"{found.device_name} ({found.device_type}): {formats}; {found.memory_free_bytes / MB:,.0f} MB free"


if __name__ == "__main__":
    raise SystemExit(main())
