"""See in which dtype a model really computes, by hooks on its linear layers."""

from collections import defaultdict
from typing import Any, Literal, Self

import torch
from torch import nn

from tasks.errors import HalfstepError
from tasks.records import ObservedPrecision, Precision

ObservedPhase = Literal["forward", "backward", "rollout"]


class PrecisionMismatch(HalfstepError):
    """What ran is not what the plan asked for."""


class PrecisionObserver:
    """Collects output dtypes of the first and last linear layer and the dtypes of their gradients."""

    def __init__(self) -> None:
        self._seen: dict[ObservedPhase, set[str]] = defaultdict(set)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # the rollout's copy of the model reports to the same observer
        return self

    def attach(self, model: nn.Module) -> None:
        """Hook the first and last linear layer below the language-model head."""
        layers = [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lm_head" not in name]
        for layer in (layers[0], layers[-1]):
            layer.register_forward_hook(self._on_forward)

    def _on_forward(self, module: nn.Linear, args: tuple[Any, ...], output: torch.Tensor) -> None:
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
            trainable_weights=tuple(sorted(weights)),
            scaler_live=scaler_live,
        )


def check_observed(observed: ObservedPrecision, planned: Precision) -> None:
    """Raise PrecisionMismatch unless every phase ran in the planned dtype and the scaler is as planned."""
    wanted = (planned.autocast_dtype,)
    seen = {"forward": observed.forward, "backward": observed.backward, "rollout": observed.rollout}
    wrong = [f"{phase} ran in {', '.join(dtypes) or 'nothing'}" for phase, dtypes in seen.items() if dtypes != wanted]
    if observed.trainable_weights != (planned.weights_dtype,):
        wrong.append(f"trainable weights are {', '.join(observed.trainable_weights)}, planned {planned.weights_dtype}")
    if observed.scaler_live != planned.grad_scaler:
        wrong.append(f"grad scaler is {'live' if observed.scaler_live else 'absent'}")
    if wrong:
        raise PrecisionMismatch(f"planned {planned.label} ({wanted[0]}), but {'; '.join(wrong)}. The attempt does not count.")


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
