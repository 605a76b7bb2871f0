"""Write one line of ``metrics.jsonl`` a step, and stop a run whose numbers mean nothing."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tasks.errors import Diverged
from tasks.memory import MB
from tasks.params import PrecisionParams
from tasks.programs.device_memory import DeviceMemory
from tasks.programs.gradients import RANGE_PROBLEM
from tasks.programs.grpo import THE_LOSS, MeteredGRPOTrainer, weights_digest
from tasks.records import TrainingWarning

# Logged by transformers or TRL, and measured more exactly here or without meaning in a chart.
_LEFT_OUT = frozenset({"loss", "step_time", "epoch", "num_tokens"})


class StepLog(TrainerCallback):  # type: ignore[misc]
    """Joins what TRL logs with our clocks, memory, scaler and mismatch; keeps what the outcome needs."""

    def __init__(
        self,
        path: Path,
        trainer: MeteredGRPOTrainer,
        memory: DeviceMemory,
        precision: PrecisionParams,
        check_first_step: Callable[[], None],
    ) -> None:
        self._path = path
        self._trainer = trainer
        self._memory = memory
        self._precision = precision
        self._check_first_step = check_first_step
        self._consecutive_skips = 0
        self.weights_at_start: str | None = None
        self._measured: dict[str, float] = {}
        self._overflows: list[tuple[int, str]] = []
        self.history: list[dict[str, float]] = []
        self.skipped_steps = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep a hash of the weights, which come from the training state if there is one."""
        self.weights_at_start = weights_digest(self._trainer.model)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the step's clock and meters."""
        self._trainer.begin_step()

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the phase."""
        self._trainer.watch.phase = "optimizer"

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the step's measures and count skipped steps."""
        trainer = self._trainer
        self._measured = {**trainer.watch.metrics(), **trainer.mismatch.metrics(), "peak_memory_mb": self._memory.peak_bytes() / MB}
        if not self.history:
            self._check_first_step()
        if trainer.scaler is None:
            return
        if trainer.gradient_scan is None:
            raise RuntimeError("the gradients were not looked at before they were clipped")
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
        limit = self._precision.max_consecutive_skips
        if self._consecutive_skips >= limit:
            where = self._overflows[-1][1]
            remedy = (
                f"A smaller precision.init_scale ({self._precision.init_scale:g}) or a larger max_consecutive_skips lets the scale settle"
            )
            if where.startswith("forward") and THE_LOSS not in where:
                remedy = RANGE_PROBLEM
            raise Diverged(
                f"step {step}: {self._consecutive_skips} optimizer steps in a row were skipped for non-finite gradients (loss scale now "
                f"{metrics['loss_scale']:g}); precision.max_consecutive_skips is {limit}. The last overflow came in the {where}. {remedy}"
            )
        # a skipped step left the weights as they were, however its loss came out
        watched = ["reward"] if self._consecutive_skips else ["loss", "reward", "grad_norm", "mismatch_kl"]
        for name in watched:
            if name in metrics and not math.isfinite(metrics[name]):
                raise Diverged(f"step {step}: {name} is {metrics[name]}; the weights can no longer be trusted")
