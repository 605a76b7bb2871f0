"""Plan in which precision to train, in which order, with which levers, and say why. Pure, but for the task that logs it.

Emulated precision never runs on an accelerator; on a CPU it is a rehearsal. What is asked for and cannot be done is refused.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.errors import RefusedInput
from tasks.levers import baseline_levers, levers_pulled, precision_effect, retry_levers
from tasks.objectives import FORMATS, LABELS, WIDER, Label, emulated, fact, first_precision, possible
from tasks.params import Params, RetryParams
from tasks.records import Attempt, Hardware, MemoryLevers, Precision, PrecisionPlan, RuledOut

# what a refusal may tell a person to set, in the order of mention
REMEDIES: dict[str, tuple[str, ...]] = {
    "mode": ("auto", *LABELS),
    "grad_scaler": ("auto",),
    "rollout_dtype": ("auto",),
    "on_divergence": ("stop",),
}


@task(cache_policy=NO_CACHE)
def decide_precision(hardware: Hardware, params: Params, because: str = "") -> PrecisionPlan:
    """Plan the attempts and log the reasons."""
    plan = plan_precision(hardware, params, because)
    logger = get_run_logger()
    for attempt in plan.attempts:
        logger.info("attempt %s: %s", attempt.name, attempt.reason)
    for ruled_out in plan.ruled_out:
        logger.info("not planned, %s: %s", ruled_out.precision, ruled_out.reason)
    return plan


def plan_precision(hardware: Hardware, params: Params, because: str = "") -> PrecisionPlan:
    """Return the attempts in order of trial, each with its reason, and why every other precision was ruled out.

    `because` says where the mode comes from if it is not the params (tasks.settled).

    Raises:
        RefusedInput: mode or rollout_dtype cannot be done on this hardware, or grad_scaler contradicts an attempt; names what can be.
    """
    refusal = _refusal(hardware, params)
    if refusal:
        raise RefusedInput(f"{refusal}; {_remedy(hardware, params)}")
    attempts = _attempts(hardware, params, because)
    parts = [attempts[0].reason]
    end = "precision.on_divergence is 'stop'" if params.precision.on_divergence == "stop" else "nothing is wider than fp32"
    narrow = [item.precision.label for item in attempts if WIDER[item.precision.label]]
    named = narrow and params.precision.on_divergence == "next"
    divergence = f"a divergence in {' or '.join(dict.fromkeys(narrow))}" if named else "a divergence"
    for kind, event, none in (("retry", "a shortage of memory", "memory.retries is empty"), ("fallback", divergence, end)):
        names = [f"{item.name} (a rehearsal)" if item.rehearsal else item.name for item in attempts if item.label == kind]
        parts.append(f"After {event}: {', then '.join(names) or f'stop, {none}'}")
    ruled_out = tuple(
        RuledOut(precision=label, reason=_why_not(label, hardware, params, attempts[0].precision.label))
        for label in LABELS
        if label not in {attempt.precision.label for attempt in attempts}
    )
    return PrecisionPlan(attempts=attempts, reason=". ".join(parts), ruled_out=ruled_out, device_type=hardware.device_type)


def _attempts(hardware: Hardware, params: Params, because: str = "") -> tuple[Attempt, ...]:
    first, reason = _baseline(hardware, params, because)
    levers = baseline_levers(params)
    attempts = [_attempt(1, "baseline", first, levers, reason, hardware, params)]
    for index, retry in enumerate(params.memory.retries):
        label, reason = _retry(index, retry, first, hardware, params)
        attempts.append(_attempt(index + 2, "retry", label, retry_levers(levers, retry), reason, hardware, params))
    for label in ("bf16", "fp32"):
        narrower = sorted({item.precision.label for item in attempts if label in WIDER[item.precision.label]})
        wanted = narrower and params.precision.on_divergence == "next"
        if wanted and possible(label, hardware, rehearse=params.precision.allow_emulated):
            reason = f"After a divergence in {' or '.join(narrower)} (precision.on_divergence is 'next'): {fact(label, hardware)}"
            reason += "; a rehearsal on a CPU" if emulated(label, hardware) else ""
            attempts.append(_attempt(len(attempts) + 1, "fallback", label, levers, reason, hardware, params))
    return tuple(attempts)


def _attempt(number: int, kind: str, label: Label, levers: MemoryLevers, reason: str, hardware: Hardware, params: Params) -> Attempt:
    rollout = params.precision.rollout_dtype
    precision = Precision(
        mixed_precision="no" if label == "fp32" else label,
        grad_scaler=label == "fp16",
        rollout_dtype=None if rollout == "auto" else rollout,
        lm_head_fp32=params.precision.lm_head_fp32,
    )
    notes = [reason]
    if rollout != "auto":
        rehearsal = ", a rehearsal on a CPU" if emulated(FORMATS[rollout], hardware) else ""
        notes.append(f"The rollout samples in {rollout} (precision.rollout_dtype): {fact(FORMATS[rollout], hardware)}{rehearsal}")
    if precision.lm_head_fp32:
        notes.append("The language-model head computes in fp32 (precision.lm_head_fp32)")
    return Attempt(
        number=number,
        label=kind,
        precision=precision,
        levers=levers,
        engine=params.training.engine,
        rehearsal=emulated(label, hardware) or emulated(FORMATS[precision.sampling_dtype], hardware),
        reason=". ".join([*notes, _range(precision, params)]),
    )


def _baseline(hardware: Hardware, params: Params, because: str) -> tuple[Label, str]:
    mode, objective = params.precision.mode, params.precision.objective
    assert mode != "measured"  # see _refusal
    if mode == "auto":
        label, reason = first_precision(hardware, objective)
        return label, f"{because}: {reason}" if because else reason
    rehearsal = "; on a CPU that is a rehearsal, slow but true to the format" if emulated(mode, hardware) else ""
    overruled = f"; the mode overrules precision.objective {objective!r}" if objective != "stability" else ""
    return mode, f"{because or f'precision.mode is {mode!r}'}: {fact(mode, hardware)}{rehearsal}{overruled}"


def _retry(index: int, retry: RetryParams, first: Label, hardware: Hardware, params: Params) -> tuple[Label, str]:
    label = retry.precision
    why = f"memory.retries[{index}] after a shortage of memory: {fact(label, hardware)}"
    if label != first and not possible(label, hardware, rehearse=params.precision.allow_emulated):
        label = first
        why += f", so {retry.precision} is ruled out and the retry runs in {label}, where the levers still free memory"
    elif emulated(label, hardware):
        why += "; a rehearsal on a CPU"
    old = baseline_levers(params)
    return label, f"{why}. {precision_effect(first, label)}. {levers_pulled(old, retry_levers(old, retry))}"


def _range(precision: Precision, params: Params) -> str:
    stored, settings = params.base_model.stored_dtype, params.precision
    text = f"The base model's weights are stored in {stored}"
    if stored != "bfloat16" or "float16" not in (precision.autocast_dtype, precision.sampling_dtype):
        return text
    text += ", which has the range of fp32: activations beyond 65504 may overflow float16"
    if precision.label != "fp16":
        return f"{text} in the rollout"
    then = "the run stops" if settings.on_divergence == "stop" else "a fallback goes on from the last training state"
    skips = f"{settings.max_consecutive_skips} skipped steps in a row count as divergence"
    return f"{text}, and the grad scaler cannot mend an overflow in the forward; {skips}, and {then} (precision.on_divergence)"


def _refusal(hardware: Hardware, params: Params) -> str:
    asked = params.precision
    assert asked.mode != "measured", "tasks.settled puts a precision in its place"
    if asked.mode != "auto" and not possible(asked.mode, hardware, rehearse=True):
        return f"precision.mode is {asked.mode!r} but {fact(asked.mode, hardware)}"
    if asked.rollout_dtype != "auto" and not possible(FORMATS[asked.rollout_dtype], hardware, rehearse=True):
        return f"precision.rollout_dtype is {asked.rollout_dtype!r} but {fact(FORMATS[asked.rollout_dtype], hardware)}"
    for attempt in _attempts(hardware, params):
        label = attempt.precision.label
        if asked.grad_scaler not in ("auto", attempt.precision.grad_scaler):
            where = {"baseline": f"the baseline (precision.mode {asked.mode!r})", "retry": f"memory.retries[{attempt.number - 2}]"}
            at = where.get(attempt.label, "the fallback (precision.on_divergence 'next')")
            need = "needs one, or small gradients underflow" if label == "fp16" else "has no use for one: its range is that of fp32"
            return f"precision.grad_scaler is {str(asked.grad_scaler).lower()}, but {at} runs in {label}, which {need}"
    return ""


def _remedy(hardware: Hardware, params: Params) -> str:
    """Name each single change that is accepted; where none is, 'auto' for all that can be on it, which always is."""
    ways = []
    for name, values in REMEDIES.items():
        changed = {value: params.precision.model_copy(update={name: value}) for value in values}
        tried = {value: params.model_copy(update={"precision": section}) for value, section in changed.items()}
        if accepted := [value for value in values if not _refusal(hardware, tried[value])]:
            ways.append(f"set precision.{name} to {' or '.join(map(repr, accepted))}")
    wished = [name for name, values in REMEDIES.items() if values[0] == "auto" != getattr(params.precision, name)]
    return ", or ".join(ways) or "set " + " and ".join(f"precision.{name} to 'auto'" for name in wished)


def _why_not(label: Label, hardware: Hardware, params: Params, first: str) -> str:
    asked = [f"memory.retries[{index}]" for index, retry in enumerate(params.memory.retries) if retry.precision == label]
    instead = f"; {' and '.join(asked)} asked for it and runs in {first} instead" if asked else ""
    if possible(label, hardware, rehearse=params.precision.allow_emulated):
        return f"{fact(label, hardware)}, but precision.mode {params.precision.mode!r} starts in {first} and no retry names {label}"
    way = "; set precision.allow_emulated to true to rehearse it" if possible(label, hardware, rehearse=True) else ""
    return f"{fact(label, hardware)}{way}{instead}"
