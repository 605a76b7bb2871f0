"""Levers on peak memory: what a retry pulls, and what to say of it. Pure."""

from tasks.params import Params, RetryParams
from tasks.records import MemoryLevers


def baseline_levers(params: Params) -> MemoryLevers:
    """Return the levers as the params set them; auto with the objective memory starts with gradient checkpointing."""
    training = params.training
    saves = params.precision.mode == "auto" and params.precision.objective == "memory"
    return MemoryLevers(
        per_device_train_batch_size=training.per_device_train_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        gradient_checkpointing=training.gradient_checkpointing or saves,
        rollout_batch_size=training.rollout_batch_size,
    )


def retry_levers(baseline: MemoryLevers, retry: RetryParams) -> MemoryLevers:
    """Return the levers of a retry, derived from the baseline's; the effective batch stays the same."""
    return MemoryLevers(
        per_device_train_batch_size=baseline.per_device_train_batch_size // retry.micro_batch_divisor,
        gradient_accumulation_steps=baseline.gradient_accumulation_steps * retry.micro_batch_divisor,
        gradient_checkpointing=baseline.gradient_checkpointing or retry.gradient_checkpointing,
        rollout_batch_size=baseline.rollout_batch_size,
    )


def precision_effect(old: str, new: str) -> str:
    """Say what a change of precision alone does to memory (autocast keeps weights, gradients and optimizer states in fp32)."""
    if old == new:
        return f"The precision stays {new}, which frees nothing"
    if old == "fp32":
        return f"Going from fp32 to {new} shrinks only activations under autocast; weights, gradients and optimizer states stay fp32"
    if new == "fp32":
        return f"Going from {old} to fp32 takes more memory for activations"
    return f"Going from {old} to {new} frees no memory by itself, both take 2 bytes"


def levers_pulled(old: MemoryLevers, new: MemoryLevers) -> str:
    """Say which levers change, old -> new."""
    changes = [
        ("micro-batch", str(old.per_device_train_batch_size), str(new.per_device_train_batch_size)),
        ("gradient accumulation", str(old.gradient_accumulation_steps), str(new.gradient_accumulation_steps)),
        ("gradient checkpointing", _switch(old.gradient_checkpointing), _switch(new.gradient_checkpointing)),
    ]
    pulled = ", ".join(f"{name} {before} -> {after}" for name, before, after in changes if before != after)
    if not pulled:
        return "No lever is pulled: only a smaller rollout chunk, after a shortage in the rollout, can free memory"
    return f"Levers pulled: {pulled}; the effective batch stays {new.effective_batch_size}"


def _switch(value: bool) -> str:
    return "on" if value else "off"
