"""Write one line of ``metrics.jsonl`` a step, and stop a run whose numbers mean nothing."""

import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tasks.errors import Diverged
from tasks.memory import MB
from tasks.programs.device_memory import DeviceMemory
from tasks.programs.gradients import RANGE_PROBLEM
from tasks.programs.grpo import MeteredGRPOTrainer
from tasks.records import TrainingWarning

# Logged by transformers or TRL, and measured more exactly here or without meaning in a chart.
_LEFT_OUT = frozenset({"loss", "step_time", "epoch", "num_tokens"})


class StepLog(TrainerCallback):  # type: ignore[misc]
    """Joins what TRL logs with our clocks, memory, scaler and mismatch; keeps what the outcome needs."""

    def __init__(self, path: Path, memory: DeviceMemory, max_consecutive_skips: int) -> None:
        self._path = path
        self._memory = memory
        self._max_consecutive_skips = max_consecutive_skips
        self._consecutive_skips = 0
        self._measured: dict[str, float] = {}
        self._overflows: list[tuple[int, str]] = []
        self.trainer: MeteredGRPOTrainer | None = None
        self.history: list[dict[str, float]] = []
        self.skipped_steps = 0

    def bind(self, trainer: MeteredGRPOTrainer) -> None:
        """Name the trainer whose steps are logged (it is built after its callbacks)."""
        self.trainer = trainer

    @property
    def _bound(self) -> MeteredGRPOTrainer:
        if self.trainer is None:
            raise RuntimeError("StepLog.bind was not called before training")
        return self.trainer

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the step's clock and meters."""
        self._bound.begin_step()

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the phase."""
        self._bound.watch.phase = "optimizer"

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the step's measures and count skipped steps."""
        trainer = self._bound
        self._measured = {**trainer.watch.metrics(), **trainer.mismatch.metrics(), "peak_memory_mb": self._memory.peak_bytes() / MB}
        if trainer.scaler is None or trainer.gradient_scan is None:
            return
        skipped = bool(trainer.accelerator.optimizer_step_was_skipped)
        self._consecutive_skips = self._consecutive_skips + 1 if skipped else 0
        self.skipped_steps += skipped
        self._measured |= {
            "loss_scale": trainer.scaler.get_scale(),
            "step_skipped": float(skipped),
            "consecutive_skips": float(self._consecutive_skips),
            "skipped_steps": float(self.skipped_steps),
            "gradient_underflow_fraction": trainer.gradient_scan.underflow_fraction,
        }
        if skipped:
            where = trainer.forward_overflow or trainer.gradient_scan.overflow_layer or "no single layer"
            self._overflows.append((state.global_step, f"{'forward' if trainer.forward_overflow else 'backward'} of {where}"))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any) -> None:
        """Write the step's line; raise Diverged if it says that training has come to nothing."""
        if "loss" not in logs:
            return
        theirs = {name: float(value) for name, value in logs.items() if name not in _LEFT_OUT and isinstance(value, int | float)}
        metrics = {**theirs, **self._measured}
        self.history.append({"step": float(state.global_step), **metrics})
        line = json.dumps({"step": state.global_step, "time": time.time(), "metrics": metrics})
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
        self._check(state.global_step, metrics)

    def overflow_warning(self) -> tuple[TrainingWarning, ...]:
        """Return where numbers left fp16's range first and most often, if a step was skipped."""
        if not self._overflows:
            return ()
        (step, first), (often, times) = self._overflows[0], Counter(where for _, where in self._overflows).most_common(1)[0]
        message = f"fp16 overflowed first in the {first}; most often, in {times} of {len(self._overflows)} skipped steps, in the {often}"
        return (TrainingWarning(name="fp16_overflow", step=step, message=message),)

    def _check(self, step: int, metrics: dict[str, float]) -> None:
        if self._consecutive_skips >= self._max_consecutive_skips:
            last = self._overflows[-1][1]
            raise Diverged(
                f"step {step}: {self._consecutive_skips} optimizer steps in a row were skipped for non-finite gradients "
                f"(loss scale now {metrics['loss_scale']:g}); precision.max_consecutive_skips is {self._max_consecutive_skips}. "
                f"The last overflow came in the {last}. {RANGE_PROBLEM if last.startswith('forward') else ''}".rstrip()
            )
        # a skipped step left the weights as they were, however its loss came out
        watched = ["reward"] if self._consecutive_skips else ["loss", "reward", "grad_norm", "mismatch_kl"]
        for name in watched:
            if name in metrics and not math.isfinite(metrics[name]):
                raise Diverged(f"step {step}: {name} is {metrics[name]}; the weights can no longer be trusted")
