"""Levers on peak memory: what a retry pulls, and what to say of it. Pure."""

from itertools import accumulate
from typing import NamedTuple

from tasks.params import Params, RetryParams
from tasks.records import MemoryLevers

# rank of the adapters that a suggestion names
LORA_RANK = 16
LEVER_NAMES = {name: field.title for name, field in MemoryLevers.model_fields.items() if field.title}
TASK_CHANGING = {"LoRA rank", "completion length"}


def baseline_levers(params: Params) -> MemoryLevers:
    """Return the levers as the params set them; auto with the objective memory starts with gradient checkpointing."""
    # a completion length differs from the params' only in a retry
    levers = MemoryLevers(**params.training.model_dump(include=set(MemoryLevers.model_fields) - {"max_completion_length"}))
    saves = params.precision.mode == "auto" and params.precision.objective == "memory"
    return with_lever(levers, "gradient_checkpointing", levers.gradient_checkpointing or saves)


def retry_levers(baseline: MemoryLevers, retry: RetryParams) -> MemoryLevers:
    """Return the levers of a retry, derived from the baseline's; the effective batch stays the same."""
    micro_batch = baseline.per_device_train_batch_size
    smaller = with_lever(baseline, "per_device_train_batch_size", micro_batch // retry.divisor(micro_batch))
    pulled = ("gradient_checkpointing", "optimizer_8bit", "compact_allocator", "lora_rank", "max_completion_length")
    return smaller.model_copy(update={name: getattr(retry, name) or getattr(baseline, name) for name in pulled})


def precision_effect(old: str, new: str) -> str:
    """Say what a change of precision alone does to memory (autocast keeps weights, gradients and optimizer states in fp32)."""
    if old == new:
        return f"The precision stays {new}, which frees nothing"
    if old == "fp32":
        return f"Going from fp32 to {new} shrinks only activations under autocast; weights, gradients and optimizer states stay fp32"
    if new == "fp32":
        return f"Going from {old} to fp32 takes more memory for activations"
    return f"Going from {old} to {new} frees no memory by itself, both take 2 bytes"


class Change(NamedTuple):
    """One lever that is set otherwise, and the levers with it and all changes before it."""

    lever: str
    text: str
    levers: MemoryLevers


def changes(old: MemoryLevers, new: MemoryLevers) -> list[Change]:
    """Return what leads from `old` to `new`, one lever at a time."""
    steps: list[Change] = []
    for field, name in LEVER_NAMES.items():
        before, after = getattr(old, field), getattr(new, field)
        if before != after:
            levers = with_lever(steps[-1].levers if steps else old, field, after)
            steps.append(Change(name, f"{_shown(before)} -> {_shown(after)}", levers))
    return steps


def with_lever(levers: MemoryLevers, field: str, value: object) -> MemoryLevers:
    """Return levers with one of them set; accumulation follows the micro-batch, so that the effective batch stays."""
    update = {field: value}
    if field == "per_device_train_batch_size" and isinstance(value, int):
        update["gradient_accumulation_steps"] = levers.effective_batch_size // value
    return levers.model_copy(update=update)


def levers_pulled(old: MemoryLevers, new: MemoryLevers) -> str:
    """Say which levers change, old -> new, and which of them change the task."""
    pulled = [f"{lever}{' (changes the task)' * (lever in TASK_CHANGING)} {text}" for lever, text, _ in changes(old, new)]
    if not pulled:
        return "No lever is pulled: only a smaller rollout chunk, after a shortage in the rollout, can free memory"
    size = new.per_device_train_batch_size
    stays = f"the micro-batch stays {size}, " if size == old.per_device_train_batch_size else ""
    return f"Levers pulled: {', '.join(pulled)}; {stays}the effective batch stays {new.effective_batch_size}"


def single_levers(levers: MemoryLevers, compact: bool) -> list[Change]:
    """Return each lever that is not yet pulled, pulled alone; `compact`: whether a compact allocator is there."""
    return [change for field, value in _wanted(levers, compact).items() for change in changes(levers, with_lever(levers, field, value))]


def thriftier(levers: MemoryLevers, compact: bool) -> list[MemoryLevers]:
    """Return levers that change more and more: each alone, together, smaller step by step; LoRA changes the task and is last."""
    wanted = _wanted(levers, compact)
    rank, states = wanted.pop("lora_rank"), wanted.pop("optimizer_8bit")
    tried = [with_lever(levers, field, value) for field, value in (*wanted.items(), ("optimizer_8bit", states))]
    tried += accumulate(wanted.items(), lambda made, item: with_lever(made, *item), initial=levers)
    while (smaller := _smaller(tried[-1])) != tried[-1]:
        tried.append(smaller)
    tried += [with_lever(tried[-1], "optimizer_8bit", states), with_lever(tried[-1], "lora_rank", rank)]
    return [one for one in dict.fromkeys(tried) if one != levers]


def _smaller(levers: MemoryLevers) -> MemoryLevers:
    wanted = _wanted(levers, compact=False)
    chunk = with_lever(levers, "rollout_batch_size", wanted["rollout_batch_size"])
    return with_lever(chunk, "per_device_train_batch_size", wanted["per_device_train_batch_size"])


def _wanted(levers: MemoryLevers, compact: bool) -> dict[str, object]:
    micro_batch = levers.per_device_train_batch_size
    return {
        "per_device_train_batch_size": micro_batch // RetryParams().divisor(micro_batch),
        "gradient_checkpointing": True,
        "rollout_batch_size": max(1, (levers.rollout_batch_size or levers.effective_batch_size) // 2),
        "optimizer_8bit": levers.optimizer_8bit or levers.lora_rank is None,
        "compact_allocator": levers.compact_allocator or compact,
        "lora_rank": levers.lora_rank or LORA_RANK,
    }


def _shown(value: bool | int | None) -> str:
    return "all" if value is None else ("off", "on")[value] if isinstance(value, bool) else str(value)
