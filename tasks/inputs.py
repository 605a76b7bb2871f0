"""Find an input of a run by its spec, or build it once into the store."""

from collections.abc import Callable
from pathlib import Path

from prefect.logging import get_run_logger

from tasks.files import file_lock
from tasks.places import PROJECT_DIR, STORE_DIR
from tasks.program_request import ask_program
from tasks.records import ArtifactVersion, Record
from tasks.specs import Spec
from tasks.versioning.inputs import find_input, input_key
from tasks.versioning.store import Kind, store_folder


def find_or_build(kind: Kind, spec: Spec, module: str, request_for: Callable[[Path], Record], run_dir: Path) -> ArtifactVersion:
    """Return the folder whose manifest names `spec`; where there is none, build it with a program and store it.

    `request_for` makes the program's request, given the folder to make. Of two runs that need the same input, one waits.
    """
    logger, key = get_run_logger(), input_key(spec)
    lock = STORE_DIR.parent / "building" / f"{kind}-{key}.lock"
    with file_lock(lock, lambda: logger.info("%s: another run is at work on the same one; waiting for it", kind)):
        if found := find_input(PROJECT_DIR, kind, spec, STORE_DIR):
            logger.info("%s: already built, %s (%s)", kind, found.path, found.location)
            return found
        logger.info("%s: no folder has this spec; building it once", kind)
        work_dir = run_dir / kind
        out_dir = work_dir.resolve() / key
        ask_program(module, request_for(out_dir), work_dir, logger.info)
        return store_folder(STORE_DIR, out_dir, kind, key)
