"""Write one line of ``metrics.jsonl`` a step, and stop a run whose numbers mean nothing."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tasks.errors import Diverged
from tasks.memory import MB
from tasks.params import PrecisionParams
from tasks.programs.device_memory import DeviceMemory
from tasks.programs.grpo import THE_LOSS, MeteredGRPOTrainer, weights_digest
from tasks.programs.observation import RANGE_PROBLEM
from tasks.records import TrainingWarning

# Logged by transformers or TRL, and measured more exactly here or without meaning in a chart.
_LEFT_OUT = frozenset({"loss", "step_time", "epoch", "num_tokens"})

_MEANS = frozenset({"loss", "mismatch_kl"})
_ROOT_MEAN_SQUARES = frozenset({"mismatch_rms", "mismatch_relative"})


@dataclass(eq=False)
class StepLog(TrainerCallback):  # type: ignore[misc]
    """Joins what TRL logs with our clocks, memory, scaler and mismatch; keeps what the outcome needs."""

    path: Path
    trainer: MeteredGRPOTrainer
    memory: DeviceMemory
    precision: PrecisionParams
    check_first_step: Callable[[], None]
    weights_at_start: str | None = None
    history: list[dict[str, float]] = field(default_factory=list)
    skipped_steps: int = 0
    consecutive_skips: int = 0
    overflows: list[tuple[int, str]] = field(default_factory=list)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep a hash of the weights, which come from the training state if there is one."""
        self.weights_at_start = weights_digest(self.trainer.model)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the step's clock and meters."""
        self.trainer.begin_step()

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the phase."""
        self.trainer.watch.phase = "optimizer"

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the step's measures, count skipped steps, and have the state saved that was due at a skipped step."""
        trainer = self.trainer
        control.should_save |= trainer.state_owed
        own = {**trainer.watch.metrics(), **trainer.mismatch.metrics(), "peak_memory_mb": self.memory.peak_bytes() / MB}
        gathered = gather_object([(own, trainer.forward_overflow)])
        self._measured = over_ranks([metrics for metrics, _ in gathered])
        forward_overflow = next((layer for _, layer in gathered if layer), None)
        if not self.history:
            self.check_first_step()
        if trainer.accelerator.scaler is None:
            return
        if trainer.gradient_scan is None:
            raise RuntimeError("the gradients were not looked at before they were clipped")
        skipped = bool(trainer.accelerator.optimizer_step_was_skipped)
        self.consecutive_skips = self.consecutive_skips + 1 if skipped else 0
        self.skipped_steps += skipped
        self._measured |= {
            "loss_scale": trainer.accelerator.scaler.get_scale(),
            "step_skipped": float(skipped),
            "consecutive_skips": float(self.consecutive_skips),
            "skipped_steps": float(self.skipped_steps),
            "gradient_underflow_fraction": trainer.gradient_scan.underflow_fraction,
        }
        if skipped:
            where = forward_overflow or trainer.gradient_scan.overflow_layer or "no single layer"
            self.overflows.append((state.global_step, f"{'forward' if forward_overflow else 'backward'} of {where}"))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any) -> None:
        """Write the step's line; raise Diverged if it says that training has come to nothing."""
        if "loss" not in logs:
            return
        theirs = {name: float(value) for name, value in logs.items() if name not in _LEFT_OUT and isinstance(value, int | float)}
        metrics = {**theirs, **self._measured}
        self.history.append({"step": float(state.global_step), **metrics})
        if self.trainer.accelerator.is_main_process:
            line = json.dumps({"step": state.global_step, "time": time.time(), "metrics": metrics})
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
        self._check(state.global_step, metrics)

    def overflow_warning(self) -> tuple[TrainingWarning, ...]:
        """Return where numbers left fp16's range first and most often, if a step was skipped."""
        if not self.overflows:
            return ()
        (step, first), (often, times) = self.overflows[0], Counter(where for _, where in self.overflows).most_common(1)[0]
        message = f"fp16 overflowed first in the {first}; most often, in {times} of {len(self.overflows)} skipped steps, in the {often}"
        return (TrainingWarning(name="fp16_overflow", step=step, message=message),)

    def _check(self, step: int, metrics: dict[str, float]) -> None:
        limit = self.precision.max_consecutive_skips
        if self.consecutive_skips >= limit:
            where = self.overflows[-1][1]
            remedy = (
                f"A smaller precision.init_scale ({self.precision.init_scale:g}) or a larger max_consecutive_skips lets the scale settle"
            )
            if where.startswith("forward") and THE_LOSS not in where:
                remedy = RANGE_PROBLEM
            raise Diverged(
                f"step {step}: {self.consecutive_skips} optimizer steps in a row were skipped for non-finite gradients (loss scale now "
                f"{metrics['loss_scale']:g}); precision.max_consecutive_skips is {limit}. The last overflow came in the {where}. {remedy}"
            )
        # a skipped step left the weights as they were, however its loss came out
        watched = ["reward"] if self.consecutive_skips else ["loss", "reward", "grad_norm", "mismatch_kl"]
        for name in watched:
            if name in metrics and not math.isfinite(metrics[name]):
                raise Diverged(f"step {step}: {name} is {metrics[name]}; the weights can no longer be trusted")


def over_ranks(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Return a step's measures over all ranks: tokens add up, losses and squares are averaged, of the rest the largest counts.

    NaN stays NaN. Of several ranks each one's peak memory stands beside the largest.
    """
    if len(metrics) == 1:
        return metrics[0]
    joined = {f"peak_memory_mb/device_{rank}": own["peak_memory_mb"] for rank, own in enumerate(metrics)}
    for name in dict.fromkeys(name for own in metrics for name in own):
        values = torch.tensor([own[name] for own in metrics if name in own], dtype=torch.float64)
        if name in _MEANS:
            joined[name] = float(values.mean())
        elif name in _ROOT_MEAN_SQUARES:
            joined[name] = float(values.square().mean().sqrt())
        else:
            joined[name] = float(values.sum() if name == "tokens_per_second" else values.max())
    return joined
