"""Predict what attempts take before they are made, from dry runs in a child process, and compare it with what is available."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from pydantic import ValidationError

from tasks.engines.catalog import ENGINES
from tasks.errors import HalfstepError
from tasks.files import read_record
from tasks.hardware import free_memory
from tasks.levers import changes, single_levers, thriftier
from tasks.memory import MB
from tasks.next_attempt import SHORT
from tasks.params import Params
from tasks.peak_memory import PeakRequest, PredictionRequest, effects
from tasks.places import PROJECT_DIR, STATE_DIR, STORE_DIR
from tasks.program_request import ask_program
from tasks.records import Attempt, FinishedAttempt, Hardware, MemoryLevers, MemoryPrediction, Precision, PrecisionPlan, RunSetting
from tasks.report import overrides_text, prediction_text
from tasks.specs import MANIFEST_FILE, DatasetManifest, dataset_spec, model_config
from tasks.versioning.inputs import find_input, input_key

PREDICTIONS_DIR = STATE_DIR / "predictions"
# what of our own code a prediction rests on
_PROGRAMS = ("__init__", "lifecycle", "dry_run", "predict_memory", "grpo", "adapters", "half_precision", "device_memory")
SOURCES = ("peak_memory.py", *(f"programs/{name}.py" for name in _PROGRAMS))
# what the child that predicts takes over from here: what allocators keep, and how many threads have an arena of their own
ENVIRONMENT = ("MALLOC_", "GLIBC_TUNABLES", "OMP_NUM_THREADS", "PYTORCH_")
Say = Callable[[str], None]


class Wanted(NamedTuple):
    """What a peak is predicted of."""

    params: Params
    precision: Precision
    levers: MemoryLevers


class Forecast(NamedTuple):
    """Predicts attempts on one machine, model and dataset; what it predicted before comes from ``state/predictions``."""

    hardware: Hardware
    prompt_length: int
    say: Say

    def predict(self, wanted: Sequence[Wanted]) -> list[MemoryPrediction]:
        """Return each prediction beside what is available; one process makes all that are missing, and keeps each as it is made.

        Raises:
            HalfstepError: a dry run failed, and those after it were not made; training may well work where it does.
        """
        peaks = [self._named_request(*one) for one in wanted]
        if missing := {name: request for name, request in peaks if _kept(name) is None}:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(model_config(wanted[0].params.base_model)), encoding="utf-8")
                asked = PredictionRequest(base_model_dir=Path(folder), out_dir=PREDICTIONS_DIR.resolve(), peaks=missing)
                ask_program("tasks.programs.predict_memory", asked, Path(folder), self.say)
        kept = [read_record(PREDICTIONS_DIR / name, MemoryPrediction) for name, _ in peaks]
        return [self._beside_available(its, one.params) for its, one in zip(kept, wanted, strict=True)]

    def _named_request(self, params: Params, precision: Precision, levers: MemoryLevers) -> tuple[str, PeakRequest]:
        training = params.training
        request = PeakRequest(
            device_type=self.hardware.device_type,
            precision=precision,
            levers=levers,
            prompt_length=self.prompt_length,
            completion_length=levers.max_completion_length or training.max_completion_length,
            beta=training.beta,
            num_processes=training.num_processes,
        )
        files = [(PROJECT_DIR / "tasks" / name).read_text(encoding="utf-8") for name in SOURCES]
        versions = [version(library) for library in ("torch", "transformers", "trl", "peft", "bitsandbytes")]
        facts: dict[str, object] = {"device": self.hardware.device_name, "cpus": self.hardware.num_cpus, "versions": versions}
        facts["environment"] = {name: text for name, text in os.environ.items() if name.startswith(ENVIRONMENT)}
        facts |= request.model_dump(mode="json") | {"files": files, "model": model_config(params.base_model)}
        return f"{input_key(facts)}.json", request

    def _beside_available(self, prediction: MemoryPrediction, params: Params) -> MemoryPrediction:
        free, budget = self.hardware.memory_free_bytes, params.memory.budget_mb
        if self.hardware.device_type == "cpu":
            # all processes, their imports included, share the host's memory; a budget is each one's and begins after its imports
            free = free // params.training.num_processes - prediction.import_bytes
        available = free if budget is None else min(free, int(budget * MB))
        return prediction.model_copy(update={"available_bytes": available})


def _kept(name: str) -> MemoryPrediction | None:
    # one that another version wrote, or that a full disk cut short, is made again
    with contextlib.suppress(OSError, ValidationError):
        return read_record(PREDICTIONS_DIR / name, MemoryPrediction)
    return None


@task(cache_policy=NO_CACHE, task_run_name="predict {attempt.name}")
def predict_peak(attempt: Attempt, setting: RunSetting, params: Params) -> Attempt:
    """Return `attempt` with its predicted peak, what is available, and what each change from the baseline does to it."""
    logger = get_run_logger()
    if params.memory.preflight == "off":
        return attempt
    # in a comparison no run is another's baseline
    baseline, precision = attempt if attempt.variant else setting.plan.attempts[0], attempt.precision
    steps = [(change.lever, change.text, change.levers) for change in changes(baseline.levers, attempt.levers)]
    if precision != baseline.precision:
        steps.insert(0, ("precision", f"{baseline.precision.label} -> {precision.label}", baseline.levers))
    wanted = [(precision, attempt.levers), (baseline.precision, baseline.levers), *((precision, levers) for *_, levers in steps)]
    try:
        found = _of_run(setting, logger.info).predict([Wanted(params, *one) for one in wanted])
    except HalfstepError as error:
        logger.warning("%s: no peak is predicted: %s", attempt.name, error)
        return attempt
    tell = logger.info if found[0].fits else logger.warning
    tell("%s: %s", attempt.name, prediction_text(found[0]))
    made = [(lever, text, its) for (lever, text, _), its in zip(steps, found[2:], strict=True)]
    return attempt.model_copy(update={"prediction": found[0], "effects": effects(found[1], made, chained=True)})


@task(cache_policy=NO_CACHE)
def what_would_fit(setting: RunSetting, params: Params, finished: tuple[FinishedAttempt, ...]) -> str:
    """Return the least change predicted to fit, as overrides, after a run that ended for want of memory; otherwise nothing.

    What does not change the task comes before what does, and then what surely fits before what may.
    """
    last = finished[-1].outcome
    if last.status not in SHORT or last.shortage == "host" or params.memory.preflight == "off":
        return ""
    baseline, made = setting.plan.attempts[0], {done.attempt.levers for done in finished}
    tried = [one for one in thriftier(baseline.levers, _has_compact_allocator(setting.hardware, params)) if one not in made]
    if not tried:
        return "No lever is left to pull: it takes more memory, or a smaller model"
    try:
        found = _of_run(setting, get_run_logger().info).predict([Wanted(params, baseline.precision, levers) for levers in tried])
    except HalfstepError as error:
        return f"What would fit could not be predicted: {error}"

    def last_resort(index: int) -> tuple[bool, bool]:
        return tried[index].lora_rank != baseline.levers.lora_rank, not found[index].surely_fits

    fitting = [index for index, prediction in enumerate(found) if prediction.fits]
    least = min(fitting, key=last_resort, default=-1)
    told = f"{overrides_text(tried[least], params)} ({prediction_text(found[least])})"
    if not fitting:
        return f"Nothing would fit, not even {told}"
    return f"By prediction this {'would' if found[least].surely_fits else 'might'} fit: {told}"


def _has_compact_allocator(hardware: Hardware, params: Params) -> bool:
    return ENGINES[params.training.engine].has_compact_allocator(hardware)


def longest_prompt(dataset_dir: Path) -> int:
    """Return the tokens of a built dataset's longest prompt."""
    return read_record(dataset_dir / MANIFEST_FILE, DatasetManifest).longest_prompt


def _of_run(setting: RunSetting, say: Say) -> Forecast:
    # what others hold may have changed since the flow began
    hardware = setting.hardware.model_copy(update={"memory_free_bytes": free_memory(setting.hardware)})
    return Forecast(hardware, longest_prompt(setting.dataset.version.path), say)


def forecast_of_plan(hardware: Hardware, params: Params, say: Say) -> Forecast:
    """Return what predicts the attempts of a plan, whose dataset may not be built yet; builds nothing."""
    data = find_input(PROJECT_DIR, "datasets", dataset_spec(params.dataset, params.base_model), STORE_DIR)
    longest = longest_prompt(data.path) if data else params.dataset.max_prompt_length
    if data is None:
        until = "may be too high until a first run builds it (that of params/retrain.yaml: make data)"
        say(f"the dataset is not built yet: peaks are for prompts of {longest} tokens (dataset.max_prompt_length), and {until}")
    return Forecast(hardware, longest, say)


def with_predictions(plan: PrecisionPlan, hardware: Hardware, params: Params, say: Say) -> PrecisionPlan:
    """Return `plan` with its attempts' predicted peaks and what each lever would free; builds nothing."""
    if params.memory.preflight == "off":
        return plan
    alone = single_levers(plan.attempts[0].levers, _has_compact_allocator(hardware, params))
    wanted = [Wanted(params, attempt.precision, attempt.levers) for attempt in plan.attempts]
    wanted += [Wanted(params, plan.attempts[0].precision, change.levers) for change in alone]
    forecast = forecast_of_plan(hardware, params, say)
    try:
        found = forecast.predict(wanted)
    except HalfstepError as error:
        say(f"no peak is predicted: {error}")
        return plan
    attempts = [one.model_copy(update={"prediction": its}) for one, its in zip(plan.attempts, found, strict=False)]
    each = [(change.lever, change.text, its) for change, its in zip(alone, found[len(attempts) :], strict=True)]
    return plan.model_copy(update={"attempts": tuple(attempts), "levers": effects(found[0], each, chained=False)})
