"""Find an input of a run by its spec, or build it once into the store."""

from collections.abc import Callable
from pathlib import Path

from prefect.logging import get_run_logger

from tasks.places import PROJECT_DIR, STORE_DIR
from tasks.program_request import ask_program
from tasks.records import ArtifactVersion, Record
from tasks.specs import Spec
from tasks.versioning.inputs import find_input, input_key
from tasks.versioning.store import Kind, store_folder


def find_or_build(kind: Kind, spec: Spec, module: str, request_for: Callable[[Path], Record], run_dir: Path) -> ArtifactVersion:
    """Return the folder whose manifest names `spec`; where there is none, build it with a program and store it.

    `request_for` makes the program's request, given the folder to make.
    """
    logger = get_run_logger()
    found = find_input(PROJECT_DIR, kind, spec, STORE_DIR)
    if found:
        logger.info("%s: already built, %s (%s)", kind, found.path, found.location)
        return found
    logger.info("%s: no folder has this spec; building it once", kind)
    work_dir = run_dir / kind
    out_dir = work_dir.resolve() / input_key(spec)
    ask_program(module, request_for(out_dir), work_dir, logger.info)
    return store_folder(STORE_DIR, out_dir, kind, input_key(spec))
