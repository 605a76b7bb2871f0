"""The rules of the house that a machine can check by reading the sources."""

import ast
import dataclasses
from pathlib import Path

import pytest
from trl import GRPOConfig

from tasks.engines.trl_local import OWNED_ARGUMENTS
from tasks.params import TrainingParams
from tasks.places import PROJECT_DIR
from tasks.programs.train import UNKNOWN_TO_TRL

SOURCES = sorted([*PROJECT_DIR.glob("flows/**/*.py"), *PROJECT_DIR.glob("tasks/**/*.py")])
HOMES = {
    "torch": "tasks/programs/",
    "transformers": "tasks/programs/",
    "trl": "tasks/programs/",
    "accelerate": "tasks/programs/",
    "datasets": "tasks/programs/",
    "peft": "tasks/programs/",
    "bitsandbytes": "tasks/programs/",
    "mlflow": "tasks/tracking/",
    "dvc": "tasks/versioning/",
}
FORBIDDEN_IN_PROGRAMS = {"prefect", "mlflow", "dvc"}


def name_of(path: Path) -> str:
    return str(path.relative_to(PROJECT_DIR))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_each_library_is_imported_only_at_its_home(path: Path) -> None:
    for library in imports(path) & set(HOMES):
        assert name_of(path).startswith(HOMES[library]), f"{name_of(path)} imports {library}"
    if name_of(path).startswith("tasks/programs/"):
        assert not imports(path) & FORBIDDEN_IN_PROGRAMS


def test_programs_reach_no_orchestrator_through_other_modules() -> None:
    reached: set[Path] = set()
    waiting = sorted((PROJECT_DIR / "tasks" / "programs").glob("*.py"))
    while waiting:
        path = waiting.pop()
        reached.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tasks"):
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                files = [PROJECT_DIR / f"{target.replace('.', '/')}.py" for target in targets]
                waiting += [file for file in files if file.is_file() and file not in reached]
    bad = {name_of(path): imports(path) & FORBIDDEN_IN_PROGRAMS for path in reached if imports(path) & FORBIDDEN_IN_PROGRAMS}
    assert bad == {}


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parent.name == "flows" and path.name != "__init__.py"], ids=name_of)
def test_a_flow_reads_as_a_table_of_contents(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    tree = ast.parse(text)
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Try | ast.With | ast.ClassDef), f"{name_of(path)}:{node.lineno}"
    assert not imports(path) & {"os", "subprocess", "pathlib"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_stand_at_the_top(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            inner = [child for child in ast.walk(node) if isinstance(child, ast.Import | ast.ImportFrom)]
            assert not inner, f"{name_of(path)}:{node.name}"


def test_no_file_of_flows_bears_a_librarys_name() -> None:
    assert {path.stem for path in (PROJECT_DIR / "flows").glob("*.py")}.isdisjoint({"prefect", "torch", "trl", "mlflow", "datasets"})


def test_the_engine_knows_every_argument_the_program_sets() -> None:
    tree = ast.parse((PROJECT_DIR / "tasks" / "programs" / "train.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "GRPOConfig"]
    # beside the fields of params.training, which are passed by their names
    assert {keyword.arg for keyword in calls[0].keywords if keyword.arg} == set(OWNED_ARGUMENTS) - set(TrainingParams.model_fields)
    assert set(TrainingParams.model_fields) - UNKNOWN_TO_TRL <= {field.name for field in dataclasses.fields(GRPOConfig)}
