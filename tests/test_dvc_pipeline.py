"""dvc.lock belongs to the sources and params at hand: otherwise `make data` would build anew and leave the tree dirty."""

import pytest
import yaml

from tasks.params import load_params
from tasks.places import PROJECT_DIR
from tasks.specs import base_model_spec, dataset_spec
from tasks.versioning.folders import hash_file

LOCKED = yaml.safe_load((PROJECT_DIR / "dvc.lock").read_text())["stages"]
REMEDY = "run `make data` and commit dvc.lock"


@pytest.mark.parametrize("stage", LOCKED)
def test_the_lock_is_of_these_sources_and_params(stage: str) -> None:
    for dep in LOCKED[stage]["deps"]:
        if not dep["path"].startswith("data/"):
            assert dep["md5"] == hash_file(PROJECT_DIR / dep["path"]), f"{dep['path']} has changed: {REMEDY}"
    for file, sections in LOCKED[stage]["params"].items():
        found = yaml.safe_load((PROJECT_DIR / file).read_text())
        assert sections == {name: found[name] for name in sections}, f"{file} has changed: {REMEDY}"


def test_every_module_that_shapes_a_spec_is_a_dependency() -> None:
    params = load_params(PROJECT_DIR / "params" / "retrain.yaml")
    assert dataset_spec(params.dataset, params.base_model)["base_model"] == base_model_spec(params.base_model)
    assert all("tasks/specs.py" in [dep["path"] for dep in stage["deps"]] for stage in LOCKED.values())
