"""What is predicted, what it is compared with, and when it is made again; the dry run itself is in tests/programs."""

from pathlib import Path

import pytest

from tasks import prediction
from tasks.files import write_record
from tasks.memory import MB, PeakRequest
from tasks.params import Params
from tasks.prediction import available_bytes, find_or_predict
from tasks.records import MemoryLevers, MemoryPrediction
from tasks.report import prediction_text
from tests.machines import hardware_of
from tests.training_runs import precision

MADE = MemoryPrediction(
    peak_bytes=200 * MB,
    error_bytes=20 * MB,
    phase="backward",
    categories={"weights": 50 * MB, "optimizer_states": 149 * MB, "logits": MB},
    phases={"rollout": 100 * MB, "backward": 200 * MB},
)


def request(base_model_dir: Path, micro_batch: int = 4) -> PeakRequest:
    levers = MemoryLevers(per_device_train_batch_size=micro_batch, gradient_accumulation_steps=1, gradient_checkpointing=False)
    return PeakRequest(
        base_model_dir=base_model_dir,
        out_file=Path(),
        device_type="cpu",
        precision=precision("bf16"),
        levers=levers,
        prompt_length=8,
        completion_length=8,
        beta=0,
    )


@pytest.mark.parametrize(("available", "verdict"), [(220, "fits"), (219, "may fit"), (180, "may fit"), (179, "does not fit")])
def test_only_beyond_the_error_bound_is_a_verdict_certain(available: int, verdict: str) -> None:
    asked = MADE.model_copy(update={"available_bytes": available * MB})
    assert asked.fits == (verdict != "does not fit")
    start = f"predicted peak 200 MB +- 10 % in the backward of {available} MB available: {verdict}"
    assert prediction_text(asked) == f"{start} (optimizer states 149, weights 50, logits 1)"


def test_what_is_available_is_the_budget_or_what_is_free() -> None:
    hardware = hardware_of("tesla_t4")
    assert available_bytes(hardware, Params()) == hardware.memory_free_bytes
    for budget, found in ((100.0, 100 * MB), (1e9, hardware.memory_free_bytes)):
        assert available_bytes(hardware, Params.model_validate({"memory": {"budget_mb": budget}})) == found


def test_a_prediction_is_made_once_for_what_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PeakRequest] = []

    def program(module: str, request: PeakRequest, work_dir: Path, say: object) -> None:
        asked.append(request)
        write_record(request.out_file, MADE)

    monkeypatch.setattr(prediction, "PREDICTIONS_DIR", tmp_path / "predictions")
    monkeypatch.setattr(prediction, "ask_program", program)
    for name, text in (("a", "{}"), ("same", "{}"), ("other", '{"hidden_size": 8}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    assert find_or_predict(request(tmp_path / "a")) == MADE
    find_or_predict(request(tmp_path / "same"))
    assert len(asked) == 1
    find_or_predict(request(tmp_path / "other"))
    find_or_predict(request(tmp_path / "a", micro_batch=8))
    monkeypatch.setattr(prediction, "version", lambda library: "0.0")
    find_or_predict(request(tmp_path / "a"))
    assert len(asked) == 4
