"""What fp16 did to a step's gradients, and where numbers first left the range of the format."""

from typing import Any, NamedTuple

import torch
from torch import nn

from tasks.programs.observation import muted_observers

RANGE_PROBLEM = (
    "A range problem: fp16 ends at 65504, and no loss scale mends activations beyond it; train and sample in bf16 or fp32 "
    "(precision.on_divergence: next does so by itself)"
)


class GradientScan(NamedTuple):
    """One look at the gradients before they are clipped."""

    underflow_fraction: float
    """Share of the elements of the linear layers' weight gradients that are exactly 0; 1 where no group had a signal."""
    overflow_layer: str | None
    """The parameter nearest to the model's end whose gradient is not finite: the backward meets it early."""


def scan_gradients(model: nn.Module) -> GradientScan:
    """Count what fp16 rounded to zero and find where it overflowed; reads each gradient twice."""
    linear = {id(module.weight) for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lm_head" not in name}
    zeros = elements = 0
    overflow = None
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is None:
            continue
        # a sum is finite unless an element is not: scaled gradients are far below the range of fp32
        if overflow is None and not torch.isfinite(weight.grad.sum()):
            overflow = name
        if id(weight) in linear:
            elements += weight.grad.numel()
            zeros += weight.grad.numel() - int(torch.count_nonzero(weight.grad))
    return GradientScan(zeros / elements if elements else 0.0, overflow)


def first_non_finite_layer(model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> str | None:
    """Run the forward again and name the first module whose output is not finite; None if all are.

    Logits are computed for the last position only, and a shortage of memory costs no more than the name.
    """
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if not found and isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                found.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad(), muted_observers():
            model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=1, use_cache=False)
    except (RuntimeError, MemoryError) as error:
        return f"a layer that could not be found ({type(error).__name__} while looking for it)"
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
