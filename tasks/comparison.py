"""Plan a comparison: which variant runs when, with which seed, and what is left to run. Pure, but for the task that logs it."""

import contextlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.errors import HalfstepError, RefusedInput
from tasks.files import read_record, write_record
from tasks.params import ComparisonParams, Params, with_overrides
from tasks.precision import plan_precision
from tasks.prediction import Forecast, Wanted, forecast_of_plan, longest_prompt
from tasks.records import Attempt, FinishedAttempt, Hardware, MemoryPrediction, PrecisionPlan, Record, RuledOut, RunSetting
from tasks.request import check_engine, resolve_params

# what a variant may set; all else is the work, which is the same for all
COMPARED_SECTIONS = ("precision", "training", "memory")
# the hardware of a comparison's first start
MACHINE_FILE = "machine.json"
SAME_WORK = ("seed", "max_steps", "num_generations", "max_completion_length", "total_batch_size", "temperature")
# the same of training.engine_args: what is asked, sampled and rewarded
SAME_ARGUMENTS = (
    *("top_k", "top_p", "min_p", "repetition_penalty", "generation_kwargs", "cache_implementation"),
    *("data_seed", "shuffle_dataset", "chat_template_kwargs", "reward_weights", "multi_objective_aggregation"),
)

# of a run that is ended from outside time and again
MAX_STARTS = 3
SAME_MACHINE = ("device_type", "device_name", "device_count", "num_cpus", "driver_version", "torch_version")
LIBRARIES = ("torch", "transformers", "trl", "accelerate")


class _Begun(Record):
    hardware: Hardware
    versions: dict[str, str]


def resolve_comparison(
    params: str,
    variants: list[str] | None = None,
    seeds: int | None = None,
    overrides: list[str] | None = None,
    resume: str | None = None,
) -> Params:
    """Return the params of a comparison of `variants` (names; None: all) with so many `seeds`, every variant checked.

    Raises:
        RefusedInput: names the variant and the field at fault.
    """
    resolved = resolve_params(params, overrides=overrides, resume=resume, flow="compare")
    asked = resolved.comparison
    if resume is not None and (variants is not None or seeds is not None):
        raise RefusedInput("a resumed comparison keeps its own variants and seeds; leave out --variants and --seeds")
    if unknown := [name for name in variants or () if name not in asked.variants]:
        raise RefusedInput(
            f"--variants {','.join(variants or ())}: {unknown[0]!r} is none of comparison.variants ({', '.join(asked.variants)})"
        )
    if variants and len(set(variants)) < len(variants):
        raise RefusedInput(f"--variants {','.join(variants)}: name each variant once; for more runs of each: --seeds N")
    chosen = {name: asked.variants[name] for name in variants or asked.variants}
    if seeds is not None and seeds < 1:
        raise RefusedInput(f"--seeds {seeds}: take 1 or more, the number of rounds")
    rounds = asked.seeds if seeds is None else tuple(asked.seeds[0] + turn for turn in range(seeds))
    resolved = with_overrides(resolved, {"comparison.variants": chosen, "comparison.seeds": list(rounds)}, params)
    if asked.warmup_steps >= resolved.training.max_steps:
        found = f"leaves none of training.max_steps {resolved.training.max_steps} to measure"
        raise RefusedInput(f"comparison.warmup_steps {asked.warmup_steps} {found}; lower it, or train for more steps")
    for name, seed in run_order(resolved.comparison):
        variant_params(resolved, name, seed)
    return resolved


def variant_params(params: Params, variant: str, seed: int | None) -> Params:
    """Return the params of one run: one attempt without a retry, on the same work as every other.

    Raises:
        RefusedInput: the variant's overrides are refused, or change the work.
    """
    origin, overrides = f"comparison.variants.{variant}", params.comparison.variants[variant]
    if other := [path for path in overrides if path.split(".")[0] not in COMPARED_SECTIONS or "." not in path]:
        allowed = ", ".join(COMPARED_SECTIONS)
        raise RefusedInput(f"{origin}.{other[0]}: all variants do the same work, so that a variant sets fields of {allowed} only")
    whole = {"training.seed": seed, "training.save_steps": params.training.max_steps, "precision.on_divergence": "stop"}
    common = with_overrides(params, {**whole, "memory.retries": []}, origin)
    own = with_overrides(common, overrides, origin)
    if own.precision.mode == "measured":
        raise RefusedInput(f"{origin}: precision.mode 'measured' rests on a comparison; name a precision, or 'auto'")
    work = _work(own)
    for field, asked in _work(common).items():
        if asked != (found := work[field]):
            named = field.replace("total_batch_size", "per_device_train_batch_size x gradient_accumulation_steps x num_processes")
            raise RefusedInput(f"{origin}: training.{named} {asked} -> {found} changes the work, which is the same for all variants")
    return own


def _work(params: Params) -> dict[str, Any]:
    training = params.training
    arguments = {f"engine_args.{name}": training.engine_args.get(name) for name in SAME_ARGUMENTS}
    return {field: getattr(training, field) for field in SAME_WORK} | arguments


@task(cache_policy=NO_CACHE)
def decide_order(run_dir: Path, hardware: Hardware, params: Params) -> PrecisionPlan:
    """Plan the runs and log the order and what is refused.

    Raises:
        RefusedInput: no variant can run here, or the comparison was begun on another machine.
    """
    path, versions = run_dir / MACHINE_FILE, library_versions()
    if not path.is_file():
        write_record(path, _Begun(hardware=hardware, versions=versions))
    begun = read_record(path, _Begun)
    others = machine_differences(begun.hardware, hardware)
    others += [f"{name} ({begun.versions.get(name)}, here {ours})" for name, ours in versions.items() if begun.versions.get(name) != ours]
    if others:
        remedy = "go on with it there, or start a new one"
        raise RefusedInput(f"comparison {run_dir.name} was begun on another machine or version, {', '.join(others)}; {remedy}")
    plan = plan_comparison(hardware, params)
    logger = get_run_logger()
    logger.info("%s: %s", plan.reason, ", ".join(attempt.name for attempt in plan.attempts))
    for refused in plan.ruled_out:
        logger.warning("variant %s is refused: %s", refused.precision, refused.reason)
    return plan


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that train."""
    return {name: version(name) for name in LIBRARIES}


def machine_differences(theirs: Hardware, ours: Hardware) -> list[str]:
    """Return what sets two machines apart whose times are not comparable, such as 'num_cpus (8, here 2)'."""
    pairs = {name: (getattr(theirs, name), getattr(ours, name)) for name in SAME_MACHINE}
    return [f"{name} ({there}, here {here})" for name, (there, here) in pairs.items() if there != here]


def plan_comparison(hardware: Hardware, params: Params) -> PrecisionPlan:
    """Return all runs in their order, round by round: round i begins with variant i. What this hardware refuses is ruled out.

    Raises:
        RefusedInput: no variant can run here.
    """
    names, seeds = list(params.comparison.variants), params.comparison.seeds
    first: dict[str, Attempt] = {}
    refused: list[RuledOut] = []
    for name in names:
        own = variant_params(params, name, seeds[0])
        try:
            check_engine(hardware, own)
            first[name] = plan_precision(hardware, own).attempts[0]
        except RefusedInput as error:
            refused.append(RuledOut(precision=name, reason=str(error)))
    if not first:
        raise RefusedInput("no variant can run here\n" + "\n".join(f"  {item.precision}: {item.reason}" for item in refused))
    attempts = tuple(
        first[name].model_copy(update={"number": number, "variant": name, "seed": seed})
        for number, (name, seed) in enumerate(run_order(params.comparison), 1)
        if name in first
    )
    reason = (
        f"{len(names)} variants with {len(seeds)} seed(s), each run in a process of its own; "
        "every round begins with the next variant, so that a noisy machine favours none"
    )
    return PrecisionPlan(attempts=attempts, reason=reason, ruled_out=tuple(refused), device_type=hardware.device_type)


def predicted_comparison(plan: PrecisionPlan, hardware: Hardware, params: Params, say: Callable[[str], None]) -> PrecisionPlan:
    """Return `plan` with each run's predicted peak, by its variant's own settings."""
    wanted, found = _wanted(plan, params), dict[str, MemoryPrediction]()
    if not wanted:
        return plan
    forecast = forecast_of_plan(hardware, params, say)
    _predict_together(forecast, wanted)
    for variant, one in wanted.items():
        try:
            (found[variant],) = forecast.predict([one])
        except HalfstepError as error:
            say(f"{variant}: no peak is predicted: {error}")
    attempts = tuple(attempt.model_copy(update={"prediction": found.get(attempt.variant)}) for attempt in plan.attempts)
    return plan.model_copy(update={"attempts": attempts})


@task(cache_policy=NO_CACHE)
def predict_variants(setting: RunSetting, params: Params) -> None:
    """Have the peaks of all variants predicted, which predict_peak then finds."""
    forecast = Forecast(setting.hardware, longest_prompt(setting.dataset.version.path), get_run_logger().info)
    _predict_together(forecast, _wanted(setting.plan, params))


def _wanted(plan: PrecisionPlan, params: Params) -> dict[str, Wanted]:
    own = {attempt.variant: (variant_params(params, attempt.variant, attempt.seed), attempt) for attempt in plan.attempts}
    return {name: Wanted(its, one.precision, one.levers) for name, (its, one) in own.items() if its.memory.preflight != "off"}


def _predict_together(forecast: Forecast, wanted: dict[str, Wanted]) -> None:
    """Predict all variants in one process; what fails or comes after it is asked for again by itself."""
    with contextlib.suppress(HalfstepError):
        forecast.predict(list(wanted.values()))


def run_order(asked: ComparisonParams) -> list[tuple[str, int]]:
    """Return variant and seed of every run, a round of all variants for each seed; round i begins with variant i, counted round."""
    names = list(asked.variants)
    return [(names[(turn + place) % len(names)], seed) for turn, seed in enumerate(asked.seeds) for place in range(len(names))]


def next_run(plan: PrecisionPlan, finished: tuple[FinishedAttempt, ...]) -> Attempt | None:
    """Return the run to make next: the first that has not ended, in a fresh folder if it was cut off; None when all have."""
    for attempt in plan.attempts:
        starts = [done for done in finished if (done.attempt.variant, done.attempt.seed) == (attempt.variant, attempt.seed)]
        cut_off = bool(starts) and starts[-1].outcome.status == "cancelled"
        if not starts or (cut_off and (starts[-1].in_earlier_start or len(starts) < MAX_STARTS)):
            return attempt.model_copy(update={"resumption": len(starts)})
    return None


def last_starts(finished: tuple[FinishedAttempt, ...]) -> tuple[FinishedAttempt, ...]:
    """Return what counts of each run: its last start."""
    return tuple({(done.attempt.variant, done.attempt.seed): done for done in finished}.values())
