"""Measure how far the policy that samples and the policy that trains are apart, on the sampled tokens.

Both have the same weights; they differ by rounding: the rollout's dtype and KV cache against the training forward.
Source: "Defeating the Training-Inference Mismatch via FP16" (arXiv 2510.26788); the KL estimate is Schulman's k3.
"""

import torch
from transformers import LogitsProcessor

from tasks.errors import Diverged


class NonFiniteLogits(Diverged):
    """The rollout's logits are NaN or inf, so that nothing can be sampled from them."""


class SamplingRecorder(LogitsProcessor):  # type: ignore[misc]
    """Keeps the log-probability of each sampled token under the whole distribution at the sampling temperature.

    Runs before top-k and the like, so that training sees the same quantity, and after a repetition penalty or suppressed
    tokens, if engine_args ask for them: what they change is then part of the mismatch. Holds the scores of one token,
    (batch, vocabulary) fp32, longer than generation itself does.

    Raises:
        NonFiniteLogits: before anything is sampled from NaN or inf, which on CUDA would end the process.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._scores: torch.Tensor | None = None
        self._log_partition = torch.empty(0)
        self._columns: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Settle the token chosen last and keep the scores (batch, vocabulary) of the next."""
        self._settle(input_ids[:, -1])
        self._scores, self._log_partition = scores, (scores / self._temperature).logsumexp(dim=-1)
        if not torch.isfinite(self._log_partition).all():
            raise NonFiniteLogits("the rollout's logits are not finite")
        return scores

    def log_probs(self, completion_ids: list[list[int]]) -> list[list[float]]:
        """Return log-probabilities in nats, shaped as `completion_ids`, which generation returned."""
        last = [ids[-1] if len(ids) > len(self._columns) else 0 for ids in completion_ids]
        self._settle(torch.tensor(last, device=self._log_partition.device))
        rows = torch.stack(self._columns, dim=1).tolist()
        return [row[: len(ids)] for row, ids in zip(rows, completion_ids, strict=True)]

    def _settle(self, chosen: torch.Tensor) -> None:
        if self._scores is not None:
            self._columns.append(self._scores.gather(1, chosen[:, None])[:, 0] / self._temperature - self._log_partition)
        self._scores = None


class MismatchMeter:
    """Keeps a step's log-probabilities of the sampled tokens and tells how far they are apart."""

    def __init__(self) -> None:
        self._pairs: list[torch.Tensor] = []

    def add(self, trained: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> None:
        """Add log-probabilities (batch, tokens) in nats of the tokens where `mask` is 1."""
        chosen = mask.bool()
        # on the CPU: an Apple GPU has no float64
        self._pairs.append(torch.stack([trained[chosen].cpu().double(), sampled[chosen].cpu().double()]))

    def metrics(self) -> dict[str, float]:
        """Return KL(rollout || training) and the RMS and largest difference, in nats; the RMS also relative to the log-probabilities'."""
        trained, sampled = torch.cat([torch.empty(2, 0), *self._pairs], dim=1)
        if not trained.numel():
            return {}
        difference = trained - sampled
        rms, size = (float(values.square().mean().sqrt()) for values in (difference, trained))
        relative = {"mismatch_relative": rms / size} if size else {}
        kl = float((difference.expm1() - difference).mean())
        return {"mismatch_kl": kl, "mismatch_rms": rms, "mismatch_max": float(difference.abs().max()), **relative}
