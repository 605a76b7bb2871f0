"""What is predicted, what it is compared with, and when it is made again; the dry run itself is in tests/programs."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from prefect.logging import disable_run_logger

from tasks import hardware as hardware_module
from tasks import prediction
from tasks.files import write_record
from tasks.host_memory import HostMemory
from tasks.memory import MB
from tasks.params import Params
from tasks.peak_memory import PredictionRequest
from tasks.precision import plan_precision
from tasks.prediction import Forecast, Wanted, predict_peak, what_would_fit, with_predictions
from tasks.records import (
    ArtifactVersion,
    DatasetVersion,
    FinishedAttempt,
    Hardware,
    MemoryLevers,
    MemoryPrediction,
    Outcome,
    PrecisionPlan,
    RunSetting,
)
from tasks.report import prediction_text
from tasks.specs import DatasetManifest
from tests.machines import hardware_of

COUNTS = ("num_train", "num_eval", "num_dropped", "num_repeats", "num_held_out_in_train", "longest_prompt")
MADE = MemoryPrediction(
    peak_bytes=200 * MB,
    least_bytes=180 * MB,
    most_bytes=300 * MB,
    phase="backward",
    categories={"weights": 50 * MB, "optimizer_states": 149 * MB, "logits": MB},
    phases={"rollout": 100 * MB, "backward": 200 * MB},
    import_bytes=300 * MB,
)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[PredictionRequest]:
    """Requests that reached the program, which answers MADE to each peak."""
    requests: list[PredictionRequest] = []

    def program(module: str, request: PredictionRequest, work_dir: Path, say: object) -> None:
        requests.append(request)
        for name in request.peaks:
            write_record(request.out_dir / name, MADE)

    monkeypatch.setattr(prediction, "PREDICTIONS_DIR", tmp_path / "predictions")
    monkeypatch.setattr(prediction, "ask_program", program)
    return requests


def forecast(machine: str = "cpu_epyc_9r14") -> Forecast:
    return Forecast(hardware_of(machine), 8, lambda line: None)


def wanted(sections: Mapping[str, object] = MappingProxyType({}), **changed: object) -> list[Wanted]:
    planned = plan_precision(hardware_of("cpu_epyc_9r14"), Params()).attempts[0]
    return [Wanted(Params.model_validate(sections), planned.precision, planned.levers.model_copy(update=changed))]


def setting_of(folder: Path, hardware: Hardware, plan: PrecisionPlan) -> RunSetting:
    write_record(folder / "manifest.json", DatasetManifest(**{**dict.fromkeys(COUNTS, 1), "spec": {}}))
    version = ArtifactVersion(path=folder, dvc_hash="0.dir", size_bytes=0, location="nowhere")
    dataset = DatasetVersion(version=version, num_train=1, num_eval=1, num_dropped=0)
    return RunSetting.model_construct(hardware=hardware, plan=plan, base_model=version, dataset=dataset)


@pytest.mark.parametrize(("available", "verdict"), [(300, "fits"), (299, "may not fit"), (180, "may not fit"), (179, "does not fit")])
def test_only_beyond_the_bounds_is_a_verdict_certain(available: int, verdict: str) -> None:
    asked = MADE.model_copy(update={"available_bytes": available * MB})
    assert asked.fits == (verdict != "does not fit")
    start = f"predicted peak 200 MB (180 to 300) in the backward of {available} MB available: {verdict}"
    assert prediction_text(asked) == f"{start} (optimizer states 149, weights 50, logits 1)"


def test_what_is_available_is_the_budget_or_what_is_free_after_the_imports(tmp_path: Path, asked: list[PredictionRequest]) -> None:
    for machine, imports in (("tesla_t4", 0), ("cpu_epyc_9r14", 300 * MB)):
        free = hardware_of(machine).memory_free_bytes - imports
        for budget, found in ((None, free), (100.0, 100 * MB), (1e9, free)):
            predicted = forecast(machine).predict(wanted({"memory": {"budget_mb": budget}}))
            assert predicted[0].available_bytes == found


def test_a_prediction_is_made_once_for_what_it_depends_on(
    tmp_path: Path, asked: list[PredictionRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    forecast().predict([*wanted(), *wanted(), *wanted(per_device_train_batch_size=4)])
    assert len(asked) == 1 and len(asked[0].peaks) == 2
    forecast().predict(wanted())
    assert len(asked) == 1
    forecast().predict(wanted({"base_model": {"source": "scratch", "num_hidden_layers": 3}}))
    forecast("cpu_xeon_8488c").predict(wanted())
    monkeypatch.setattr(prediction, "version", lambda library: "0.0")
    forecast().predict(wanted())
    assert len(asked) == 4
    for name, makes in (("OMP_NUM_THREADS", 1), ("MALLOC_ARENA_MAX", 1), ("A_NAME_OF_NO_MEANING", 0)):
        before = len(asked)
        monkeypatch.setenv(name, "3")
        forecast().predict(wanted())
        assert len(asked) == before + makes
    # set before torch is imported in the child, or when it starts
    assert {"programs/__init__.py", "programs/lifecycle.py"} <= set(prediction.SOURCES)


def test_a_kept_prediction_that_cannot_be_read_is_made_again(tmp_path: Path, asked: list[PredictionRequest]) -> None:
    forecast().predict(wanted())
    (kept,) = (tmp_path / "predictions").iterdir()
    for broken in ("", "{", kept.read_text().replace("peak_bytes", "peak")):
        kept.write_text(broken)
        assert forecast().predict(wanted())[0].peak_bytes == MADE.peak_bytes
    assert len(asked) == 4


def test_what_is_free_is_read_again_before_each_attempt(
    tmp_path: Path, asked: list[PredictionRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, hardware = Params(), hardware_of("cpu_epyc_9r14")
    plan = plan_precision(hardware, params)
    setting = setting_of(tmp_path, hardware, plan)
    memory = HostMemory(source="a test", total_bytes=2**40, available_bytes=500 * MB)
    with disable_run_logger():
        for available, fits in ((500, True), (450, False)):
            now = memory.model_copy(update={"available_bytes": available * MB})
            monkeypatch.setattr(hardware_module, "read_host_memory", lambda now=now: now)
            made = predict_peak.fn(plan.attempts[0], setting, params).prediction
            assert made and (made.available_bytes, made.fits) == ((available - 300) * MB, fits)


def test_what_is_free_on_this_machine_is_read() -> None:
    assert 2**20 < hardware_module.free_memory(hardware_of("cpu_epyc_9r14")) < 2**50


def test_several_processes_share_the_hosts_memory_and_have_a_device_each(tmp_path: Path, asked: list[PredictionRequest]) -> None:
    training = {"strategy": "ddp", "num_processes": 4}
    for machine, shares in (("rtx_2080_ti_x4", 1), ("cpu_epyc_9r14", 4)):
        hardware = hardware_of(machine)
        made = forecast(machine).predict(wanted({"training": training}))
        assert made[0].available_bytes == hardware.memory_free_bytes // shares - (300 * MB if shares > 1 else 0)
    assert all(peak.num_processes == 4 for request in asked for peak in request.peaks.values())


def test_a_plan_needs_neither_base_model_nor_dataset(asked: list[PredictionRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "find_input", lambda *sought: None)
    said: list[str] = []
    for section in ({}, {"base_model": {"source": "scratch"}}):
        params, hardware = Params.model_validate(section), hardware_of("cpu_epyc_9r14")
        plan = with_predictions(plan_precision(hardware, params), hardware, params, said.append)
        assert all(attempt.prediction for attempt in plan.attempts) and len(plan.levers) == 6
    assert [{peak.prompt_length for peak in request.peaks.values()} for request in asked] == [{128}, {128}]
    assert said[0].startswith("the dataset is not built yet: peaks are for prompts of 128 tokens") and "make data" in said[0]


def lowered(levers: MemoryLevers) -> MemoryPrediction:
    """Return a peak of 200 MB less what each lever frees, and bounds of 5 MB."""
    freed = 10 * (8 - levers.per_device_train_batch_size) + 40 * levers.gradient_checkpointing + 20 * levers.compact_allocator
    size = 200 - freed - 20 * levers.optimizer_8bit - 40 * (levers.lora_rank is not None)
    return MADE.model_copy(update={"peak_bytes": size * MB, "least_bytes": (size - 5) * MB, "most_bytes": (size + 5) * MB})


HALF, ONE = (f"training.per_device_train_batch_size={size} training.gradient_accumulation_steps={32 // size}" for size in (4, 1))
ALL = f"{ONE} training.gradient_checkpointing=true training.rollout_batch_size=1"


@pytest.mark.parametrize(
    ("budget", "advice"),
    [
        (165, f"By prediction this would fit: {HALF} (predicted peak 160 MB"),
        # half the micro-batch might fit; with checkpointing was tried
        (158, f"would fit: {HALF} training.gradient_checkpointing=true training.rollout_batch_size=16 (predicted peak 120 MB"),
        (68, f"would fit: {ALL} training.optimizer_8bit=true training.compact_allocator=true (predicted peak 50 MB"),
        # LoRA would fit, and changes the task
        (48, f"might fit: {ALL} training.optimizer_8bit=true training.compact_allocator=true (predicted peak 50 MB"),
        (40, f"would fit: {ALL} training.compact_allocator=true training.lora_rank=16 (predicted peak 30 MB"),
        (20, f"Nothing would fit, not even {ALL} training.compact_allocator=true training.lora_rank=16 (predicted peak 30 MB"),
    ],
)
def test_what_would_fit_is_the_least_change_that_was_not_tried(
    budget: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(module: str, request: PredictionRequest, work_dir: Path, say: object) -> None:
        for name, peak in request.peaks.items():
            write_record(request.out_dir / name, lowered(peak.levers))

    monkeypatch.setattr(prediction, "PREDICTIONS_DIR", tmp_path / "predictions")
    monkeypatch.setattr(prediction, "ask_program", program)
    params, hardware = Params.model_validate({"memory": {"budget_mb": budget}}), hardware_of("cpu_epyc_9r14")
    plan = plan_precision(hardware, params)
    short = Outcome(status="out_of_memory", shortage="device")
    finished = tuple(FinishedAttempt(attempt=attempt, outcome=short, attempt_dir=tmp_path) for attempt in plan.attempts)
    with disable_run_logger():
        assert advice in what_would_fit.fn(setting_of(tmp_path, hardware, plan), params, finished)
        monkeypatch.setattr(prediction, "thriftier", lambda levers, compact: [levers])
        assert what_would_fit.fn(setting_of(tmp_path, hardware, plan), params, finished).startswith("No lever is left to pull")
