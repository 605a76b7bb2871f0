"""What a machine can do in each precision, and which comes first under each `precision.objective`. Pure."""

from typing import Literal

from tasks.records import Hardware, Support

Label = Literal["bf16", "fp16", "fp32"]
LABELS: tuple[Label, ...] = ("bf16", "fp16", "fp32")
FORMATS: dict[str, Label] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
WIDER: dict[str, tuple[Label, ...]] = {"fp16": ("bf16", "fp32"), "bf16": ("fp32",), "fp32": ()}
AIMS = {
    "stability": "bf16 first where native: its range is that of fp32",
    "consistency": "fp16 first where native: what samples and what trains differ least in it, arXiv 2510.26788",
    "speed": "a native 16-bit format before fp32, bf16 before fp16: the rate is the same and no step is skipped",
    "memory": "a native 16-bit format before fp32, and gradient checkpointing from the start",
}


def first_precision(hardware: Hardware, objective: str) -> tuple[Label, str]:
    """Return the precision that `precision.mode: auto` starts in, and the facts it rests on."""
    cautious = hardware.device_type == "cpu" and objective in ("stability", "consistency")
    order: tuple[Label, ...] = ("fp16", "bf16", "fp32") if objective == "consistency" else LABELS
    if objective == "stability" and cautious:
        order = ("bf16", "fp32")
    label = next(label for label in order if possible(label, hardware, rehearse=False))
    facts = [fact(other, hardware) for other in order[: order.index(label)]]
    if objective == "consistency" and facts:
        facts[0] += ", so the order of 'stability' holds"
    ends: dict[Label, str] = {
        "bf16": f"{fact(label, hardware)}, no grad scaler is needed",
        "fp16": f"{fact(label, hardware)}, with a grad scaler against underflow",
        "fp32": "a CPU without native bf16 starts in fp32" if cautious else "fp32 remains",
    }
    return label, f"auto, objective {objective!r} ({AIMS[objective]}): {'; '.join([*facts, ends[label]])}"


def possible(label: Label, hardware: Hardware, *, rehearse: bool) -> bool:
    """Say whether a machine can run a precision; `rehearse` lets a CPU emulate it."""
    return _level(label, hardware) is Support.native or (rehearse and hardware.device_type == "cpu" and emulated(label, hardware))


def emulated(label: Label, hardware: Hardware) -> bool:
    """Say whether a machine multiplies a format in another one."""
    return _level(label, hardware) is Support.emulated


def fact(label: Label, hardware: Hardware) -> str:
    """Say what a machine does in a precision, what that is known from, and why an accelerator does not run it."""
    if label == "fp32":
        return "fp32 runs on every device"
    support = hardware.bf16 if label == "bf16" else hardware.fp16
    never = ", and emulated precision never runs on an accelerator" if hardware.device_type != "cpu" else ""
    verb = {
        Support.native: f"{label} is native on {hardware.device_name}",
        Support.emulated: f"{hardware.device_name} only emulates {label}",
        Support.none: f"{hardware.device_name} has no {label}",
    }
    return f"{verb[support.level]} ({support.fact}){never if emulated(label, hardware) else ''}"


def _level(label: Label, hardware: Hardware) -> Support:
    return {"bf16": hardware.bf16.level, "fp16": hardware.fp16.level, "fp32": Support.native}[label]
