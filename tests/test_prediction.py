"""What is predicted, what it is compared with, and when it is made again; the dry run itself is in tests/programs."""

from pathlib import Path

import pytest

from tasks import prediction
from tasks.files import write_record
from tasks.memory import MB
from tasks.params import Params
from tasks.peak_memory import PredictionRequest
from tasks.precision import plan_precision
from tasks.prediction import Forecast
from tasks.records import MemoryLevers, MemoryPrediction, Precision
from tasks.report import prediction_text
from tests.machines import hardware_of

MADE = MemoryPrediction(
    peak_bytes=200 * MB,
    error_bytes=20 * MB,
    phase="backward",
    categories={"weights": 50 * MB, "optimizer_states": 149 * MB, "logits": MB},
    phases={"rollout": 100 * MB, "backward": 200 * MB},
    import_bytes=300 * MB,
)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[PredictionRequest]:
    """Requests that reached the program, which answers MADE to each peak; two models that are alike, and another."""
    requests: list[PredictionRequest] = []

    def program(module: str, request: PredictionRequest, work_dir: Path, say: object) -> None:
        requests.append(request)
        for name in request.peaks:
            write_record(request.out_dir / name, MADE)

    monkeypatch.setattr(prediction, "PREDICTIONS_DIR", tmp_path / "predictions")
    monkeypatch.setattr(prediction, "ask_program", program)
    for name, text in (("a", "{}"), ("same", "{}"), ("other", '{"hidden_size": 8}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    return requests


def forecast(model_dir: Path, machine: str = "cpu_epyc_9r14", **memory: object) -> Forecast:
    return Forecast(hardware_of(machine), Params.model_validate({"memory": memory}), model_dir, 8, lambda line: None)


def settings(**changed: object) -> list[tuple[Precision, MemoryLevers]]:
    planned = plan_precision(hardware_of("cpu_epyc_9r14"), Params()).attempts[0]
    return [(planned.precision, planned.levers.model_copy(update=changed))]


@pytest.mark.parametrize(("available", "verdict"), [(220, "fits"), (219, "may fit"), (180, "may fit"), (179, "does not fit")])
def test_only_beyond_the_error_bound_is_a_verdict_certain(available: int, verdict: str) -> None:
    asked = MADE.model_copy(update={"available_bytes": available * MB})
    assert asked.fits == (verdict != "does not fit")
    start = f"predicted peak 200 MB +- 10 % in the backward of {available} MB available: {verdict}"
    assert prediction_text(asked) == f"{start} (optimizer states 149, weights 50, logits 1)"


def test_what_is_available_is_the_budget_or_what_is_free_after_the_imports(tmp_path: Path, asked: list[PredictionRequest]) -> None:
    for machine, imports in (("tesla_t4", 0), ("cpu_epyc_9r14", 300 * MB)):
        free = hardware_of(machine).memory_free_bytes - imports
        for budget, found in ((None, free), (100.0, 100 * MB), (1e9, free)):
            predicted = forecast(tmp_path / "a", machine, budget_mb=budget).predict(settings())
            assert predicted[0].available_bytes == found


def test_a_prediction_is_made_once_for_what_it_depends_on(
    tmp_path: Path, asked: list[PredictionRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    forecast(tmp_path / "a").predict([*settings(), *settings(), *settings(per_device_train_batch_size=4)])
    assert len(asked) == 1 and len(asked[0].peaks) == 2
    forecast(tmp_path / "same").predict(settings())
    assert len(asked) == 1
    forecast(tmp_path / "other").predict(settings())
    forecast(tmp_path / "a", "cpu_xeon_8488c").predict(settings())
    monkeypatch.setattr(prediction, "version", lambda library: "0.0")
    forecast(tmp_path / "a").predict(settings())
    assert len(asked) == 4
    for name, makes in (("OMP_NUM_THREADS", 1), ("MALLOC_ARENA_MAX", 1), ("A_NAME_OF_NO_MEANING", 0)):
        before = len(asked)
        monkeypatch.setenv(name, "3")
        forecast(tmp_path / "a").predict(settings())
        assert len(asked) == before + makes
    # set before torch is imported in the child, or when it starts
    assert {"programs/__init__.py", "programs/lifecycle.py"} <= set(prediction.SOURCES)


def test_a_kept_prediction_that_cannot_be_read_is_made_again(tmp_path: Path, asked: list[PredictionRequest]) -> None:
    forecast(tmp_path / "a").predict(settings())
    (kept,) = (tmp_path / "predictions").iterdir()
    for broken in ("", "{", kept.read_text().replace("peak_bytes", "peak")):
        kept.write_text(broken)
        assert forecast(tmp_path / "a").predict(settings())[0].peak_bytes == MADE.peak_bytes
    assert len(asked) == 4


def test_several_processes_share_the_hosts_memory_and_have_a_device_each(tmp_path: Path, asked: list[PredictionRequest]) -> None:
    training = {"strategy": "ddp", "num_processes": 4}
    for machine, shares in (("rtx_2080_ti_x4", 1), ("cpu_epyc_9r14", 4)):
        hardware = hardware_of(machine)
        made = Forecast(hardware, Params.model_validate({"training": training}), tmp_path / "a", 8, lambda line: None).predict(settings())
        assert made[0].available_bytes == hardware.memory_free_bytes // shares - (300 * MB if shares > 1 else 0)
    assert all(peak.num_processes == 4 for request in asked for peak in request.peaks.values())
