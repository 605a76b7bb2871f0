"""What a person reads: the plan before the run and the summary after it. Pure text."""

import textwrap

from tasks.levers import LEVER_NAMES
from tasks.memory import MB
from tasks.params import Params
from tasks.records import Evaluation, FinishedAttempt, Hardware, LeverEffect, MemoryLevers, MemoryPrediction, PrecisionPlan, RunRecord


def plan_text(hardware: Hardware, plan: PrecisionPlan) -> str:
    """Return hardware, attempts with their reasons, and what was ruled out and why."""
    capability = f", {hardware.compute_capability}" if hardware.compute_capability else ""
    lines = [
        "hardware",
        f"  device      {hardware.device_count} x {hardware.device_name} ({hardware.device_type}{capability})",
        f"  bf16        {hardware.bf16.level}: {hardware.bf16.fact}",
        f"  fp16        {hardware.fp16.level}: {hardware.fp16.fact}",
        f"  memory      {hardware.memory_free_bytes / MB:,.0f} MB free of {hardware.memory_total_bytes / MB:,.0f} MB",
        f"  host        {hardware.host_memory_bytes / MB:,.0f} MB ({hardware.host_memory_fact}), {hardware.num_cpus} CPUs",
        f"  torch       {hardware.torch_version}" + (f", driver {hardware.driver_version}" if hardware.driver_version else ""),
        *(f"  note        {note}" for note in hardware.notes),
        "plan",
        _folded(f"  {plan.reason}", 2),
    ]
    for attempt in plan.attempts:
        rehearsal = ", rehearsal" if attempt.rehearsal else ""
        lines.append(f"  {attempt.name} ({levers_text(attempt.levers)}{rehearsal})")
        lines += [_folded(f"    {attempt.reason}", 4)] if attempt.reason not in plan.reason else []
        lines += [_folded(f"    {prediction_text(attempt.prediction)}", 4)] if attempt.prediction else []
    if plan.levers:
        lines.append(f"  each lever alone, by prediction, from {plan.attempts[0].name}:")
        lines += [f"    {effect_text(effect)}; peak {effect.peak_bytes / MB:,.0f} MB" for effect in plan.levers]
    lines += [_folded(f"  not {other.precision}: {other.reason}", 4) for other in plan.ruled_out]
    return "\n".join(lines)


def prediction_text(prediction: MemoryPrediction) -> str:
    """Return a predicted peak with its lower and upper bound, what is available, and what the peak is made of."""
    least, peak, most = (f"{size / MB:,.0f}" for size in (prediction.least_bytes, prediction.peak_bytes, prediction.most_bytes))
    available = ""
    if prediction.available_bytes is not None:
        verdict = "fits" if prediction.surely_fits else "may not fit" if prediction.fits else "does not fit"
        available = f" of {prediction.available_bytes / MB:,.0f} MB available: {verdict}"
    shown = _by_category(prediction.categories)
    return f"predicted peak {peak} MB ({least} to {most}) in the {prediction.phase}{available} ({shown})"


def effect_text(effect: LeverEffect) -> str:
    """Return what a lever changes at the predicted peak, in one line."""
    size = round(effect.freed_bytes / MB)
    what = f"frees {size:,} MB" if size > 0 else f"takes {-size:,} MB more" if size else "frees nothing"
    parts = _by_category(effect.freed)
    return f"{effect.lever} {effect.change} {what}{f' ({parts})' if parts else ''}"


def _by_category(sizes: dict[str, int]) -> str:
    parts = sorted(sizes.items(), key=lambda item: -abs(item[1]))
    return ", ".join(f"{name.replace('_', ' ')} {size / MB:,.0f}" for name, size in parts if abs(size) >= MB)


def overrides_text(levers: MemoryLevers, params: Params) -> str:
    """Return what sets levers apart from the params, as overrides that can be pasted behind the command.

    Retries that cannot divide the micro-batch would be refused, and are left out.
    """
    changed = {name: value for name, value in levers.model_dump(exclude_none=True).items() if getattr(params.training, name) != value}
    indivisible = any(levers.per_device_train_batch_size % (retry.micro_batch_divisor or 1) for retry in params.memory.retries)
    return " ".join([*(f"training.{name}={str(value).lower()}" for name, value in changed.items()), *["memory.retries=[]"] * indivisible])


def levers_text(levers: MemoryLevers) -> str:
    """Return an attempt's levers in a few words."""
    size = f"{levers.per_device_train_batch_size} x {levers.gradient_accumulation_steps}"
    checkpointing = "on" if levers.gradient_checkpointing else "off"
    values = levers.model_dump() | {"per_device_train_batch_size": size, "gradient_checkpointing": checkpointing}
    return ", ".join(name if values[field] is True else f"{name} {values[field]}" for field, name in LEVER_NAMES.items() if values[field])


def summary_text(record: RunRecord, steps: list[dict[str, float]], took: str) -> str:
    """Return the end of a run in a dozen lines: what ran and why, what came out, where it is."""
    last = record.attempts[-1]
    outcome = last.outcome
    rehearsal = " (rehearsal on a CPU)" if last.attempt.rehearsal else ""
    lines = [
        f"halfstep run {record.run_name}: {record.status} in {took}",
        f"  precision   {last.attempt.precision.label}{rehearsal}, {_observed(last)}",
        _folded(f"  because     {last.attempt.reason}"),
        *(f"  before      {attempt_text(done)}" for done in record.attempts[:-1]),
        f"  training    {attempt_text(last)}",
    ]
    if last.attempt.effects:
        lines.append(_folded(f"  memory      by prediction: {'; '.join(map(effect_text, last.attempt.effects))}"))
    if record.lost_steps:
        lines.append(f"  lost        {record.lost_steps} steps, {record.lost_tokens:,} tokens: done again from an earlier training state")
    rewards = [f"{step['reward']:.3f} (step {step['step']:.0f})" for step in steps if "reward" in step]
    if rewards:
        lines.append(f"  reward      {rewards[0]} -> {rewards[-1]}")
    if record.evaluation:
        lines.append(f"  accuracy    {evaluation_text(record.evaluation)}")
    if outcome.peak_memory_bytes is not None and outcome.step_time_ms is not None and outcome.tokens_per_second is not None:
        speed = f"{outcome.tokens_per_second:.0f} tokens/s, {outcome.step_time_ms / 1000:.2f} s a step"
        lines.append(f"  cost        peak {outcome.peak_memory_bytes / MB:.0f} MB, {speed} (medians)")
    if record.checkpoint:
        version, restore = record.checkpoint, f"python -m tasks.versioning restore {record.checkpoint.dvc_hash} DIR"
        lines.append(f"  checkpoint  {version.path} ({version.size_bytes / MB:.0f} MB); restore with {restore}")
    lines += [f"  warning     step {item.step}, {item.name}: {item.message}" for item in outcome.warnings]
    lines.append(f"  MLflow      make ui, run {record.tracked.run_id}")
    return "\n".join(lines)


def _folded(line: str, indent: int = 14) -> str:
    return textwrap.fill(line, width=130, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _observed(done: FinishedAttempt) -> str:
    seen = done.outcome.observed
    if seen is None:
        return "nothing was observed"
    scaler = ", grad scaler live" if seen.scaler_live else ", no grad scaler"
    dtypes = f"forward {'/'.join(seen.forward)}, backward {'/'.join(seen.backward)}, rollout {'/'.join(seen.rollout)}"
    return f"observed in {dtypes}, weights {'/'.join(seen.trainable_weights)}{scaler}"


def attempt_text(done: FinishedAttempt) -> str:
    """Return an attempt, its levers and its end in one line."""
    peak = f", peak {done.outcome.peak_memory_bytes / MB:.0f} MB" if done.outcome.peak_memory_bytes is not None else ""
    return f"{done.attempt.name} ({levers_text(done.attempt.levers)}): {done.outcome.ending}{peak}"


def evaluation_text(evaluation: Evaluation) -> str:
    """Return base against tuned, with their 95 % intervals, in one line."""
    change = f"{evaluation.num_gained} gained, {evaluation.num_lost} lost, p = {evaluation.p_value:.2g} (exact McNemar)"
    of = f"of {evaluation.base.num_problems} held-out problems"
    base, tuned = (f"{100 * it.share:.1f} % [{100 * it.low:.1f}, {100 * it.high:.1f}]" for it in (evaluation.base, evaluation.tuned))
    return f"{base} -> {tuned} {of}; {change}"
