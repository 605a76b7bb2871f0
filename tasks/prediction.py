"""Predict what each attempt takes before it is made, from a dry run in a child process, and compare it with what is available."""

import hashlib
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.errors import HalfstepError
from tasks.files import read_record
from tasks.memory import MB, PeakRequest
from tasks.params import Params
from tasks.places import PROJECT_DIR, STATE_DIR, STORE_DIR
from tasks.program_request import ask_program
from tasks.records import Attempt, Hardware, MemoryPrediction, PrecisionPlan, RunSetting
from tasks.report import prediction_text
from tasks.specs import MANIFEST_FILE, DatasetManifest, base_model_spec, dataset_spec
from tasks.versioning.inputs import find_input

PREDICTIONS_DIR = STATE_DIR / "predictions"
# what of our own code a prediction rests on
SOURCES = ("memory.py", "programs/dry_run.py", "programs/grpo.py", "programs/half_precision.py")
Say = Callable[[str], None]


@task(cache_policy=NO_CACHE, task_run_name="predict {attempt.name}")
def predict_peak(attempt: Attempt, setting: RunSetting, params: Params) -> Attempt:
    """Return `attempt` with its predicted peak and what is available, unless memory.preflight is off."""
    if params.memory.preflight == "off":
        return attempt
    prompt_length = read_record(setting.dataset.version.path / MANIFEST_FILE, DatasetManifest).longest_prompt
    logger = get_run_logger()
    predicted = _predicted(attempt, setting.hardware, params, setting.base_model.path, prompt_length, logger.warning)
    if predicted.prediction:
        tell = logger.info if predicted.prediction.fits else logger.warning
        tell("%s: %s", attempt.name, prediction_text(predicted.prediction))
    return predicted


def with_predictions(plan: PrecisionPlan, hardware: Hardware, params: Params, say: Say) -> PrecisionPlan:
    """Return `plan` with its attempts' predicted peaks, where its base model is there to look at; builds nothing."""
    if params.memory.preflight == "off":
        return plan
    model = find_input(PROJECT_DIR, "base_models", base_model_spec(params.base_model), STORE_DIR)
    data = find_input(PROJECT_DIR, "datasets", dataset_spec(params.dataset, params.base_model), STORE_DIR)
    if model is None:
        say("no peak is predicted: the base model is not built yet; `make data` or a first run builds it")
        return plan
    longest = read_record(data.path / MANIFEST_FILE, DatasetManifest).longest_prompt if data else params.dataset.max_prompt_length
    return plan.model_copy(
        update={"attempts": tuple(_predicted(attempt, hardware, params, model.path, longest, say) for attempt in plan.attempts)}
    )


def available_bytes(hardware: Hardware, params: Params) -> int:
    """Return what an attempt may take: the budget, or what is free if that is less."""
    free = hardware.memory_free_bytes
    return free if params.memory.budget_mb is None else min(free, int(params.memory.budget_mb * MB))


def _predicted(attempt: Attempt, hardware: Hardware, params: Params, base_model_dir: Path, prompt_length: int, say: Say) -> Attempt:
    request = PeakRequest(
        base_model_dir=base_model_dir.resolve(),
        out_file=Path(),
        device_type=hardware.device_type,
        precision=attempt.precision,
        levers=attempt.levers,
        prompt_length=prompt_length,
        completion_length=params.training.max_completion_length,
        beta=params.training.beta,
    )
    try:
        prediction = find_or_predict(request)
    except HalfstepError as error:
        # training may well work where the dry run does not
        say(f"{attempt.name}: no peak is predicted: {error}")
        return attempt
    available = available_bytes(hardware, params)
    return attempt.model_copy(update={"prediction": prediction.model_copy(update={"available_bytes": available})})


def find_or_predict(request: PeakRequest) -> MemoryPrediction:
    """Return the prediction for a request, made once for each model configuration, setting and version of the code."""
    out_file = PREDICTIONS_DIR / f"{_key(request)}.json"
    if not out_file.is_file():
        with tempfile.TemporaryDirectory() as folder:
            complete = request.model_copy(update={"out_file": out_file.resolve()})
            ask_program("tasks.programs.predict_memory", complete, Path(folder), lambda line: None)
    return read_record(out_file, MemoryPrediction)


def _key(request: PeakRequest) -> str:
    parts = [request.model_dump_json(exclude={"base_model_dir", "out_file"})]
    parts += [version(library) for library in ("torch", "transformers", "trl")]
    files = [request.base_model_dir / "config.json", *(PROJECT_DIR / "tasks" / name for name in SOURCES)]
    parts += [path.read_text(encoding="utf-8") for path in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
