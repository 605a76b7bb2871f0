"""Where the time, tokens and losses of one optimizer step go, and in which phase the process is."""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from tasks.records import Phase


class StepWatch:
    """Clocks and counters of the step under way; phases serve to say where a failure came, and stand in `file` for one of which
    the process says nothing.

    `num_tokens` are the prompts' and completions', padding excluded; `loss` is the sum of the micro-batches' shares.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.open("wb", buffering=0)
        self.phase = "load"

    @property
    def phase(self) -> Phase:
        """Return the phase under way."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase
        os.pwrite(self._file.fileno(), f"{phase:9}".encode(), 0)

    def begin_step(self) -> None:
        """Forget the last step."""
        self.loss = 0.0
        self.num_tokens = 0
        self._seconds: dict[str, float] = defaultdict(float)
        self._started = _now()

    @contextlib.contextmanager
    def timed(self, part: Literal["rollout", "micro_batch"]) -> Iterator[None]:
        """Count the enclosed time: a rollout, with rewards and advantages, or a micro-batch, which encloses its rollout if one is due."""
        started = _now()
        yield
        self._seconds[part] += _now() - started

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics, times in milliseconds; call at its end."""
        seconds = _now() - self._started
        return {
            "loss": self.loss,
            "step_time_ms": 1000 * seconds,
            "rollout_time_ms": 1000 * self._seconds["rollout"],
            "forward_backward_time_ms": 1000 * (self._seconds["micro_batch"] - self._seconds["rollout"]),
            "tokens_per_second": self.num_tokens / seconds,
        }


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
