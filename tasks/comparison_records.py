"""What passes between the steps of a comparison of precision variants: measures of one run, and the verdict over all of them."""

from typing import Literal

from pydantic import Field

from tasks.records import Accuracy, Record, Status

Criterion = Literal["speed", "memory", "accuracy", "stability"]
ComparedMeasure = Literal["step_time", "peak_memory", "curve_spread", "lost_steps", "accuracy", "reward"]


class RunMeasures(Record):
    """One run of one variant with one seed, its warm-up left out where nothing else is said; MB are 2**20 bytes.

    Fields with a title are rows of the report, in this order.
    """

    warmup_steps: int = Field(ge=0, description="steps left out at the start")
    measured_steps: int = Field(ge=1)
    accuracy: Accuracy | None = Field(default=None, title="held-out accuracy", description="null: not evaluated")
    reward: float | None = Field(title="reward, mean of the last fifth", description="null: not logged, as below")
    step_time_ms: float = Field(title="ms a step, median", description="as all times and rates here")
    step_time_ms_p95: float = Field(title="ms a step, 95th percentile")
    forward_backward_time_ms: float = Field(title="ms a step in forward and backward")
    rollout_time_ms: float = Field(title="ms a step in the rollout")
    tokens_per_second: float = Field(title="tokens/s")
    peak_memory_mb: float = Field(title="peak memory, MB", description="maximum over devices, of the whole run")
    peak_memory_mb_by_device: tuple[float, ...] = Field(default=(), description="of several processes")
    reward_spread: float | None = Field(title="spread of the detrended reward", description="standard deviation about its moving mean")
    entropy_spread: float | None = Field(title="spread of the detrended entropy")
    # its logarithm's: one variant's gradients may be small as a whole
    grad_norm_spread: float | None = Field(title="spread of the detrended gradient norm")
    skipped_steps: int = Field(title="skipped steps", description="of the whole run: a scaler that settles skips at the start")
    lowest_loss_scale: float | None = Field(title="lowest loss scale", description="of the whole run; null without a grad scaler")
    # of the whole run, those not skipped: a loss, reward, entropy or gradient norm that is not finite
    nan_events: int = Field(title="steps with a number that is not finite")
    mismatch_kl: float | None = Field(default=None, title="mismatch of rollout and training, KL in nats", description="median")
    mismatch_rms: float | None = Field(default=None, title="mismatch, RMS in nats", description="median")
    mismatch_max: float | None = Field(default=None, title="mismatch, largest in nats")

    @property
    def lost_share(self) -> float:
        """Return the share of the run's steps that taught nothing, skipped or not finite."""
        return (self.skipped_steps + self.nan_events) / (self.warmup_steps + self.measured_steps)


class MeasuredRun(Record):
    """What came of one variant with one seed."""

    variant: str
    seed: int
    order: int = Field(description="position in which it ran")
    status: Status
    refused: bool = Field(default=False, description="by the hardware: the run was never made, which says nothing of its stability")
    measures: RunMeasures | None = Field(default=None, description="of a run that succeeded")
    what_happened: str = Field(
        default="", description="such as 'ran out of device memory in forward, 3 of 100 steps'; empty: all went well"
    )
    correct: tuple[bool, ...] = Field(default=(), description="per held-out problem; empty: not evaluated")
    base_correct: tuple[bool, ...] = Field(default=(), description="the base model's, same problems in the same precision")


class Contrast(Record):
    """Two variants in one measure; the interval holds jointly with all others of the verdict at 95 %."""

    measure: ComparedMeasure
    better: str = Field(description="by its mean; shown to be better only if `shown`")
    worse: str = Field(description="a variant, or 'the base model', which may be the better too")
    effect: float = Field(description="worse / better; for lost steps, accuracy and reward the difference, never negative")
    low: float
    high: float
    p_value: float = Field(description="adjusted for every comparison of the verdict")
    shown: bool = Field(description="significant, and of a size that matters")
    lower_reward: bool = Field(
        default=False, description="of the better variant: what a policy that gave up is better in counts for nothing"
    )


class Finding(Record):
    """The answer to one question of the verdict."""

    criterion: Criterion
    best: str | None = Field(description="shown to be better than every other variant that finished; null: no such variant")
    sentence: str
    decides: Contrast | None = Field(default=None, description="the best against the next, or the surest; null: nothing was tested")
    contrasts: tuple[Contrast, ...] = ()

    def beats(self, one: str, other: str) -> bool:
        """Return whether `one` is shown to be better than `other` in a measure, and `other` in none."""
        ahead = {contrast.better for contrast in self.contrasts if contrast.shown and {contrast.better, contrast.worse} == {one, other}}
        return ahead == {one}


class Verdict(Record):
    """What a comparison settles, and what it does not."""

    findings: tuple[Finding, ...] = Field(description="empty without a verdict")
    sentences: tuple[str, str] = Field(description="for the head of the report")
    indicative: bool = Field(description="too few steps or seeds: no verdict is given")
    best_overall: str | None
    only_finished: str | None = Field(default=None, description="all others ran out of memory or diverged; counted, not tested")
    left: tuple[str, ...] = Field(default=(), description="variants that neither another nor the base model is shown to beat")

    @property
    def settles_something(self) -> bool:
        """Return whether variants were tested against each other, or all but one failed."""
        return bool(self.only_finished) or any(finding.decides for finding in self.findings)
