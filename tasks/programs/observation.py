"""See in which dtype a model really computes, what fp16 did to its gradients, and where numbers left the range of the format."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from tasks.errors import HalfstepError
from tasks.records import ObservedPrecision, Precision

RANGE_PROBLEM = (
    "A range problem: fp16 ends at 65504, and no loss scale mends activations beyond it; train and sample in bf16 or fp32 "
    "(precision.on_divergence: next does so by itself)"
)

ObservedPhase = Literal["forward", "backward", "rollout", "rollout_head"]


class PrecisionMismatch(HalfstepError):
    """What ran is not what the plan asked for."""


@contextlib.contextmanager
def muted_observers() -> Iterator[None]:
    """Let a forward run that is part of no step and not to be observed."""
    PrecisionObserver.muted = True
    try:
        yield
    finally:
        PrecisionObserver.muted = False


class PrecisionObserver:
    """Collects output dtypes of the first and last linear layer and the dtypes of their gradients."""

    muted: ClassVar[bool] = False

    def __init__(self) -> None:
        self._seen: dict[ObservedPhase, set[str]] = defaultdict(set)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # the rollout's copy of the model reports to the same observer
        return self

    def attach(self, model: PreTrainedModel) -> None:
        """Hook the first and last linear layer below the language-model head."""
        layers = _linear_layers(model)
        for layer in (layers[0], layers[-1]):
            layer.register_forward_hook(self._on_forward)
        # the training forward passes the head by: TRL multiplies its weights itself
        model.get_output_embeddings().register_forward_hook(self._on_head)

    def _on_head(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if not torch.is_grad_enabled() and not self.muted:
            self._seen["rollout_head"].add(_name(output))

    def _on_forward(self, module: nn.Linear, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if self.muted:
            return
        if not torch.is_grad_enabled():
            # the rollout runs without autocast: its weights' dtype is its precision
            self._seen["rollout"].add(_name(module.weight))
            return
        self._seen["forward"].add(_name(output))
        if output.requires_grad:
            output.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        self._seen["backward"].add(_name(gradient))

    def result(self, model: nn.Module, scaler_live: bool) -> ObservedPrecision:
        """Return all that was seen so far."""
        weights = {_name(parameter) for parameter in model.parameters() if parameter.requires_grad}
        seen = {phase: tuple(sorted(self._seen[phase])) for phase in get_args(ObservedPhase)}
        return ObservedPrecision(**seen, trainable_weights=tuple(sorted(weights)), scaler_live=scaler_live)


def check_observed(observed: ObservedPrecision, planned: Precision) -> None:
    """Raise PrecisionMismatch unless every phase ran in the planned dtype and the scaler is as planned."""
    trains, samples = planned.autocast_dtype, planned.sampling_dtype
    seen = {
        "forward ran": (observed.forward, trains),
        "backward ran": (observed.backward, trains),
        "rollout ran": (observed.rollout, samples),
        "rollout's head ran": (observed.rollout_head, "float32" if planned.lm_head_fp32 else samples),
        "trainable weights are": (observed.trainable_weights, planned.weights_dtype),
    }
    wrong = [f"{what} in {', '.join(dtypes) or 'nothing'}, planned {dtype}" for what, (dtypes, dtype) in seen.items() if dtypes != (dtype,)]
    if observed.scaler_live != planned.grad_scaler:
        wrong.append(f"grad scaler is {'live' if observed.scaler_live else 'absent'}")
    if wrong:
        raise PrecisionMismatch(f"planned {planned.label}, but {'; '.join(wrong)}. The attempt does not count.")


class GradientScan(NamedTuple):
    """One look at the gradients before they are clipped."""

    underflow_fraction: float
    """Share of the elements of the linear layers' weight gradients that are exactly 0; 1 where no group had a signal,
    about half in the first step of adapters, whose second matrix starts at 0."""
    overflow_layer: str | None
    """The parameter nearest to the model's end whose gradient is not finite: the backward meets it early."""


def scan_gradients(model: nn.Module) -> GradientScan:
    """Count what fp16 rounded to zero and find where it overflowed; reads each gradient twice."""
    linear = {id(module.weight) for module in _linear_layers(model)}
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

    def look(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if not found and isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
            found.append(name)

    handles = [module.register_forward_hook(functools.partial(look, name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad(), muted_observers():
            model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=1, use_cache=False)
    except (RuntimeError, MemoryError) as error:
        return f"a layer that could not be found ({type(error).__name__} while looking for it)"
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lm_head" not in name]


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
