"""Decide in which precision to train, in which order, with which levers, and say why. Pure, but for the task that logs it.

Native bf16 comes first: its range is that of fp32, so nothing underflows. Without it an accelerator trains in fp16 with a
grad scaler, a CPU in fp32. Emulated precision never runs on an accelerator; on a CPU it is a rehearsal.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.errors import RefusedInput
from tasks.levers import baseline_levers, levers_pulled, precision_effect, retry_levers
from tasks.params import Params, PrecisionMode, RetryParams
from tasks.records import Attempt, FinishedAttempt, Hardware, MemoryLevers, Precision, PrecisionPlan, RuledOut, Support

LABELS = ("bf16", "fp16", "fp32")
MODES: tuple[PrecisionMode, ...] = ("auto", "bf16", "fp16", "fp32")


class _Impossible(Exception):
    """A finding on its way to `RefusedInput`, which adds the remedy."""


@dataclass(frozen=True)
class _Draft:
    """A precision that will run: the baseline's, or the one of `retry`."""

    label: str
    rehearsal: bool
    reason: str
    retry: RetryParams | None = None


@task(cache_policy=NO_CACHE)
def decide_precision(hardware: Hardware, params: Params) -> PrecisionPlan:
    """Plan the attempts and log the reasons."""
    plan = plan_precision(hardware, params)
    logger = get_run_logger()
    for attempt in plan.attempts:
        logger.info("attempt %s: %s", attempt.name, attempt.reason)
    for ruled_out in plan.ruled_out:
        logger.info("not planned, %s: %s", ruled_out.precision, ruled_out.reason)
    return plan


def plan_precision(hardware: Hardware, params: Params) -> PrecisionPlan:
    """Return the attempts in order of trial, each with its reason, and why every other precision was ruled out.

    Raises:
        RefusedInput: the mode cannot be done on this hardware, or contradicts `precision.grad_scaler`; names what can be.
    """
    try:
        drafts = _drafts(hardware, params)
    except _Impossible as finding:
        raise RefusedInput(f"{finding}; {_remedy(hardware, params)}") from None
    baseline = baseline_levers(params)
    attempts = tuple(
        Attempt(
            number=number,
            label="baseline" if draft.retry is None else "retry",
            precision=Precision(mixed_precision=_mixed(draft.label), grad_scaler=draft.label == "fp16"),
            levers=baseline if draft.retry is None else retry_levers(baseline, draft.retry),
            engine=params.training.engine,
            rehearsal=draft.rehearsal,
            reason=draft.reason,
        )
        for number, draft in enumerate(drafts, start=1)
    )
    after = ", then ".join(f"{draft.label} (a rehearsal)" if draft.rehearsal else draft.label for draft in drafts[1:])
    retries = f"After a shortage of memory: {after}, with memory levers" if after else "No retry: memory.retries is empty"
    return PrecisionPlan(attempts=attempts, reason=f"{drafts[0].reason}. {retries}", ruled_out=_ruled_out(hardware, params, drafts))


def answer_shortage(attempt: Attempt, earlier: tuple[FinishedAttempt, ...], params: Params) -> Attempt:
    """Fit a planned retry to the shortages that came before it.

    The rollout chunk shrinks if an earlier attempt ran short in the rollout, and training goes on from the newest training
    state. Everything derives from the plan, never from the last attempt, so that nothing shrinks again and again.
    """
    if attempt.label == "baseline":
        return attempt
    notes = []
    levers = attempt.levers
    failed = [_chunk(done.attempt.levers) for done in earlier if _short_in_rollout(done)]
    if failed:
        divisor = params.memory.retries[attempt.number - 2].rollout_divisor
        planned, smallest = _chunk(levers), min(failed)
        chunk = max(1, planned // divisor if planned // divisor < smallest else smallest // divisor)
        levers = levers.model_copy(update={"rollout_batch_size": chunk})
        short = "" if chunk < smallest else f", no smaller than what failed (rollout_divisor {divisor})"
        notes.append(f"A shortage came in the rollout of {smallest} completions at once: rollout chunk {planned} -> {chunk}{short}")
    state = next((done.outcome.last_state_dir for done in reversed(earlier) if done.outcome.last_state_dir), None)
    if state:
        notes.append(f"Goes on from the training state {state.name}")
    return attempt.model_copy(update={"levers": levers, "resume_from": state, "reason": ". ".join([attempt.reason, *notes])})


def _drafts(hardware: Hardware, params: Params) -> list[_Draft]:
    baseline = _baseline(hardware, params)
    drafts = [baseline, *(_retry(index, baseline, hardware, params) for index in range(len(params.memory.retries)))]
    wish = params.precision.grad_scaler
    for number, draft in enumerate(drafts):
        if wish not in ("auto", draft.label == "fp16"):
            where = f"memory.retries[{number - 1}]" if number else f"the baseline (precision.mode {params.precision.mode!r})"
            need = "needs one, or small gradients underflow" if draft.label == "fp16" else "has no use for one: its range is that of fp32"
            raise _Impossible(f"precision.grad_scaler is {str(wish).lower()}, but {where} runs in {draft.label}, which {need}")
    return drafts


def _baseline(hardware: Hardware, params: Params) -> _Draft:
    mode = params.precision.mode
    if mode != "auto":
        if not _possible(mode, hardware, rehearse=True):
            raise _Impossible(f"precision.mode is {mode!r} but {_fact(mode, hardware)}")
        rehearsal = _emulated(mode, hardware)
        suffix = "; on a CPU that is a rehearsal, slow but true to the format" if rehearsal else ""
        return _Draft(mode, rehearsal, f"precision.mode is {mode!r}: {_fact(mode, hardware)}{suffix}")
    if hardware.bf16.level is Support.native:
        return _Draft("bf16", False, f"auto: {_fact('bf16', hardware)}; its range is that of fp32, so it needs no grad scaler")
    if hardware.device_type == "cpu":
        return _Draft("fp32", False, f"auto: {_fact('bf16', hardware)}; a CPU without native bf16 starts in fp32")
    never = ", and emulated precision never runs on an accelerator" if _emulated("bf16", hardware) else ""
    if hardware.fp16.level is Support.native:
        reason = f"auto: {_fact('bf16', hardware)}{never}; {_fact('fp16', hardware)}, with a grad scaler against underflow"
        return _Draft("fp16", False, reason)
    return _Draft("fp32", False, f"auto: {_fact('bf16', hardware)}{never}; {_fact('fp16', hardware)}; fp32 remains")


def _retry(index: int, baseline: _Draft, hardware: Hardware, params: Params) -> _Draft:
    retry = params.memory.retries[index]
    label: str = retry.precision
    why = f"memory.retries[{index}] after a shortage of memory: {_fact(label, hardware)}"
    if label != baseline.label and not _possible(label, hardware, rehearse=params.precision.allow_emulated):
        label, rehearsal = baseline.label, baseline.rehearsal
        why += f", so {retry.precision} is ruled out and the retry runs in {label}, where the levers still free memory"
    else:
        rehearsal = _emulated(label, hardware)
        why += "; a rehearsal on a CPU" if rehearsal else ""
    old = baseline_levers(params)
    return _Draft(
        label, rehearsal, f"{why}. {precision_effect(baseline.label, label)}. {levers_pulled(old, retry_levers(old, retry))}", retry
    )


def _possible(label: str, hardware: Hardware, *, rehearse: bool) -> bool:
    return label == "fp32" or _level(label, hardware) is Support.native or (rehearse and _emulated(label, hardware) and _is_cpu(hardware))


def _is_cpu(hardware: Hardware) -> bool:
    return hardware.device_type == "cpu"


def _emulated(label: str, hardware: Hardware) -> bool:
    return label != "fp32" and _level(label, hardware) is Support.emulated


def _level(label: str, hardware: Hardware) -> Support:
    return hardware.bf16.level if label == "bf16" else hardware.fp16.level


def _fact(label: str, hardware: Hardware) -> str:
    if label == "fp32":
        return "fp32 runs on every device"
    support = hardware.bf16 if label == "bf16" else hardware.fp16
    verb = {
        Support.native: f"{label} is native on {hardware.device_name}",
        Support.emulated: f"{hardware.device_name} only emulates {label}",
        Support.none: f"{hardware.device_name} has no {label}",
    }
    return f"{verb[support.level]} ({support.fact})"


def _mixed(label: str) -> str:
    return "no" if label == "fp32" else label


def _chunk(levers: MemoryLevers) -> int:
    return levers.rollout_batch_size or levers.effective_batch_size


def _short_in_rollout(done: FinishedAttempt) -> bool:
    failure = done.outcome.failure
    return done.outcome.status == "out_of_memory" and failure is not None and failure.phase == "rollout"


def _ruled_out(hardware: Hardware, params: Params, drafts: list[_Draft]) -> tuple[RuledOut, ...]:
    planned = {draft.label for draft in drafts}
    return tuple(
        RuledOut(precision=label, reason=_why_not(label, hardware, params, drafts[0].label)) for label in LABELS if label not in planned
    )


def _why_not(label: str, hardware: Hardware, params: Params, baseline: str) -> str:
    fact = _fact(label, hardware)
    asked = [f"memory.retries[{index}]" for index, retry in enumerate(params.memory.retries) if retry.precision == label]
    instead = f"; {' and '.join(asked)} asked for it and runs in {baseline} instead" if asked else ""
    if _possible(label, hardware, rehearse=params.precision.allow_emulated):
        return f"{fact}, but precision.mode {params.precision.mode!r} starts in {baseline} and no retry names {label}"
    if _is_cpu(hardware):
        return f"{fact}; set precision.allow_emulated to true to rehearse it{instead}"
    never = "; emulated precision never runs on an accelerator" if _emulated(label, hardware) else ""
    return f"{fact}{never}{instead}"


def _remedy(hardware: Hardware, params: Params) -> str:
    modes = _accepted(hardware, params)
    ways = [f"set precision.mode to {_either(modes)}"] if modes else []
    if params.precision.grad_scaler != "auto":
        free = _changed(params, grad_scaler="auto")
        able = _accepted(hardware, free)
        if params.precision.mode in able:
            ways.append("set precision.grad_scaler to 'auto'")
        elif not modes:
            ways.append(f"set precision.grad_scaler to 'auto' and precision.mode to {_either(able)}")
    return ", or ".join(ways)


def _accepted(hardware: Hardware, params: Params) -> list[PrecisionMode]:
    accepted = []
    for mode in MODES:
        try:
            _drafts(hardware, _changed(params, mode=mode))
        except _Impossible:
            continue
        accepted.append(mode)
    return accepted


def _changed(params: Params, **precision: str) -> Params:
    return params.model_copy(update={"precision": params.precision.model_copy(update=precision)})


def _either(modes: Iterable[str]) -> str:
    *first, last = (f"{mode!r}" for mode in modes)
    return f"{', '.join(first)} or {last}" if first else last
