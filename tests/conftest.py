"""Base models and a dataset that many tests share; nothing here imports torch."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tasks.files import read_record
from tasks.params import SmolLM2Params
from tasks.places import PROJECT_DIR
from tasks.specs import MANIFEST_FILE, BaseModelManifest, BaseModelRequest, DatasetRequest, base_model_spec
from tests.builds import BYTE_PROMPTS, SCRATCH, build

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

# a suite that is started in the background of a script ignores SIGINT, and so would all its children, which tests end with it
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # several tests at a time, each with children of its own: one thread a process
    os.environ.setdefault("OMP_NUM_THREADS", "1")


LONGEST = ("tests/flows/", "tests/programs/", "tests/engines/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no process is left alone with it at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "LoadScopeScheduling":
    """Keep the tests of a file in one process, and those of flows in one too: they share a server and whole-flow runs."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "flows" if nodeid.startswith("tests/flows/") else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(scope="session")
def scratch_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base_models") / "scratch"
    return build("tasks.programs.fetch_base_model", BaseModelRequest(base_model=SCRATCH, out_dir=folder), folder)


@pytest.fixture(scope="session")
def byte_dataset_dir(tmp_path_factory: pytest.TempPathFactory, scratch_model_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("datasets") / "byte_prompts"
    request = DatasetRequest(dataset=BYTE_PROMPTS, base_model=SCRATCH, base_model_dir=scratch_model_dir, out_dir=folder)
    return build("tasks.programs.prepare_dataset", request, folder)


@pytest.fixture(scope="session")
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real base model: the DVC stage's output where it is there, otherwise built once (a download of 93 MB)."""
    built = PROJECT_DIR / "data" / "base_models" / "smollm2-135m-instruct"
    manifest = built / MANIFEST_FILE
    if manifest.is_file() and read_record(manifest, BaseModelManifest).spec == base_model_spec(SmolLM2Params()):
        return built
    folder = tmp_path_factory.mktemp("base_models") / "smollm2"
    return build("tasks.programs.fetch_base_model", BaseModelRequest(base_model=SmolLM2Params(), out_dir=folder), folder)
