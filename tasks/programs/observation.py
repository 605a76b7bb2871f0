"""See in which dtype a model really computes, by hooks on its linear layers."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from tasks.errors import HalfstepError
from tasks.records import ObservedPrecision, Precision

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
        layers = [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lm_head" not in name]
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
        return ObservedPrecision(
            forward=tuple(sorted(self._seen["forward"])),
            backward=tuple(sorted(self._seen["backward"])),
            rollout=tuple(sorted(self._seen["rollout"])),
            rollout_head=tuple(sorted(self._seen["rollout_head"])),
            trainable_weights=tuple(sorted(weights)),
            scaler_live=scaler_live,
        )


def check_observed(observed: ObservedPrecision, planned: Precision) -> None:
    """Raise PrecisionMismatch unless every phase ran in the planned dtype and the scaler is as planned."""
    trains, samples = planned.autocast_dtype, planned.sampling_dtype
    seen = {
        "forward": (observed.forward, trains),
        "backward": (observed.backward, trains),
        "rollout": (observed.rollout, samples),
        "rollout's head": (observed.rollout_head, "float32" if planned.lm_head_fp32 else samples),
    }
    wrong = [
        f"{phase} ran in {', '.join(dtypes) or 'nothing'}, planned {wanted}"
        for phase, (dtypes, wanted) in seen.items()
        if dtypes != (wanted,)
    ]
    if observed.trainable_weights != (planned.weights_dtype,):
        wrong.append(f"trainable weights are {', '.join(observed.trainable_weights)}, planned {planned.weights_dtype}")
    if observed.scaler_live != planned.grad_scaler:
        wrong.append(f"grad scaler is {'live' if observed.scaler_live else 'absent'}")
    if wrong:
        raise PrecisionMismatch(f"planned {planned.label}, but {'; '.join(wrong)}. The attempt does not count.")


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
