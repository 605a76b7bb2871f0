"""Where the time, tokens and losses of one optimizer step go, and in which phase the process is."""

import contextlib
import time
from collections.abc import Iterator

import torch

from tasks.records import Phase


class StepWatch:
    """Clocks and counters of the step under way; phases serve to say where a failure came."""

    def __init__(self) -> None:
        self.phase: Phase = "load"
        self._started = 0.0
        self._rollout_seconds = 0.0
        self._micro_batch_seconds = 0.0
        self._num_tokens = 0
        self._loss = 0.0

    def begin_step(self) -> None:
        """Forget the last step."""
        self._rollout_seconds = self._micro_batch_seconds = self._loss = 0.0
        self._num_tokens = 0
        self._started = _now()

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """Count the enclosed time as rollout: generation, rewards and advantages."""
        self.phase = "rollout"
        started = _now()
        yield
        self._rollout_seconds += _now() - started

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Count the enclosed time as one micro-batch: rollout (if due), forward and backward."""
        started = _now()
        yield
        self._micro_batch_seconds += _now() - started

    def add_tokens(self, num_tokens: int) -> None:
        """Count prompt and completion tokens, padding excluded."""
        self._num_tokens += num_tokens

    def add_loss(self, loss: float) -> None:
        """Add a micro-batch's share of the step's loss."""
        self._loss += loss

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics as DESIGN names them; call at its end."""
        seconds = _now() - self._started
        return {
            "loss": self._loss,
            "step_time_ms": 1000 * seconds,
            "rollout_time_ms": 1000 * self._rollout_seconds,
            "forward_backward_time_ms": 1000 * (self._micro_batch_seconds - self._rollout_seconds),
            "tokens_per_second": self._num_tokens / seconds,
        }


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
