"""Everything that passes between steps: frozen pydantic records, refused when malformed.

Bytes are kept as bytes (``_bytes``); MB (2**20 bytes) appear only in params, MLflow and messages.
"""

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MixedPrecision = Literal["no", "bf16", "fp16"]
WeightsDtype = Literal["float32", "bfloat16", "float16"]
DeviceType = Literal["cuda", "rocm", "xpu", "mps", "npu", "cpu"]
Phase = Literal["load", "rollout", "forward", "backward", "optimizer", "save"]
ShortageKind = Literal["device", "host", "fragmentation"]
Status = Literal["succeeded", "skipped", "out_of_memory", "diverged", "failed", "cancelled"]
AUTOCAST_DTYPE: dict[MixedPrecision, WeightsDtype] = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Record(BaseModel):
    """Base of all records: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Support(StrEnum):
    """How a device computes in a 16-bit format."""

    native = "native"
    emulated = "emulated"
    none = "none"


class FormatSupport(Record):
    """Support for one 16-bit format, with the fact the answer rests on."""

    level: Support
    fact: str


class Hardware(Record):
    """What one machine offers a training run, as detected in a child process."""

    device_type: DeviceType
    device_name: str
    device_count: int = Field(ge=1)
    compute_capability: str | None = Field(default=None, description="CUDA capability such as '8.0', or the gfx name on ROCm")
    memory_total_bytes: int
    memory_free_bytes: int = Field(description="free now: what other processes hold is not counted as available")
    host_memory_bytes: int = Field(description="host memory this process may use; a cgroup limit counts")
    host_memory_fact: str = Field(description="where host_memory_bytes was read")
    bf16: FormatSupport
    fp16: FormatSupport
    driver_version: str | None = None
    torch_version: str
    num_cpus: int
    notes: tuple[str, ...] = Field(default=(), description="what could not be read and why")


class Precision(Record):
    """One precision setting; combinations that cannot train are refused here.

    Source of the rules: torch.amp (autocast and GradScaler keep fp32 trainable weights).
    """

    mixed_precision: MixedPrecision
    weights_dtype: WeightsDtype = "float32"
    grad_scaler: bool
    rollout_dtype: WeightsDtype | None = Field(default=None, description="of the weights that sample; null: what training computes in")
    lm_head_fp32: bool = Field(default=False, description="the language-model head computes in fp32, in training and in the rollout")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.mixed_precision == "fp16" and not self.grad_scaler:
            raise ValueError("fp16 without a grad scaler loses small gradients to underflow; set precision.grad_scaler to 'auto'")
        if self.mixed_precision != "fp16" and self.grad_scaler:
            remedy = "set precision.grad_scaler to 'auto' or false"
            raise ValueError(f"a grad scaler has no use in {self.label}: its range is that of fp32; {remedy}")
        if self.weights_dtype == "float16":
            raise ValueError("trainable weights in float16 cannot be unscaled by a grad scaler; keep them in float32")
        return self

    @property
    def label(self) -> str:
        """Return the short name people use: fp32, bf16 or fp16."""
        return "fp32" if self.mixed_precision == "no" else self.mixed_precision

    @property
    def autocast_dtype(self) -> WeightsDtype:
        """Return the dtype in which matrix products run."""
        return AUTOCAST_DTYPE[self.mixed_precision]

    @property
    def sampling_dtype(self) -> WeightsDtype:
        """Return the dtype of the weights that sample."""
        return self.rollout_dtype or self.autocast_dtype


class MemoryLevers(Record):
    """Settings that lower peak memory, each by its title; the effective batch is the same in every attempt."""

    per_device_train_batch_size: int = Field(ge=1, title="micro-batch", description="completions")
    gradient_accumulation_steps: int = Field(ge=1)
    gradient_checkpointing: bool = Field(title="gradient checkpointing")
    rollout_batch_size: int | None = Field(default=None, ge=1, title="rollout chunk", description="completions; null: all of a step")
    optimizer_8bit: bool = Field(default=False, title="8-bit optimizer states", description="of AdamW: 8 bits a value instead of 32")
    compact_allocator: bool = Field(default=False, title="compact allocator", description="gives freed memory back, or grows in place")
    lora_rank: int | None = Field(default=None, ge=1, title="LoRA rank", description="adapters on 16-bit weights; null: all weights")
    max_completion_length: int | None = Field(default=None, ge=1, title="completion length", description="tokens; null: the params'")

    @property
    def effective_batch_size(self) -> int:
        """Return completions per optimizer step on one device."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps


class MemoryPrediction(Record):
    """What training is expected to take at its peak: the quantity that a budget limits and an outcome's peak measures."""

    peak_bytes: int
    least_bytes: int = Field(description="a lower peak is not expected: what an allocator may keep is no part of it")
    most_bytes: int = Field(description="a higher peak is not expected: where measured, none lay above")
    phase: Phase = Field(description="where the peak comes")
    categories: dict[str, int] = Field(description="bytes by what they hold, at the peak; their sum is peak_bytes")
    phases: dict[Phase, int] = Field(description="highest use of each phase")
    import_bytes: int = Field(default=0, description="what the process takes before training, outside of peak and budget")
    available_bytes: int | None = Field(default=None, description="what the attempt may take; null: not asked yet")

    @property
    def fits(self) -> bool:
        """Return whether it may fit: a shortage is certain only where even the lower bound is not available."""
        return self.available_bytes is None or self.least_bytes <= self.available_bytes

    @property
    def surely_fits(self) -> bool:
        """Return whether it fits even if it takes as much as the upper bound."""
        return self.available_bytes is None or self.most_bytes <= self.available_bytes


class LeverEffect(Record):
    """What one change of an attempt does to its predicted peak."""

    lever: str = Field(description="what changes, such as 'micro-batch'")
    change: str = Field(description="such as '8 -> 4'")
    peak_bytes: int = Field(description="predicted with this change and those before it")
    freed: dict[str, int] = Field(description="bytes freed at the peak by category; negative where it takes more")

    @property
    def freed_bytes(self) -> int:
        """Return what the peak falls by."""
        return sum(self.freed.values())


class Attempt(Record):
    """One training process of the plan."""

    number: int = Field(ge=1)
    label: Literal["baseline", "retry", "fallback"] = Field(description="retry answers a shortage of memory, fallback a divergence")
    precision: Precision
    levers: MemoryLevers
    engine: str
    rehearsal: bool = Field(default=False, description="an emulated precision on a CPU")
    prediction: MemoryPrediction | None = None
    effects: tuple[LeverEffect, ...] = Field(default=(), description="what sets it apart from the baseline, one change after the other")
    reason: str
    resume_from: Path | None = Field(default=None, description="training state to go on from")
    resumption: int = Field(default=0, ge=0, description="how often this attempt was begun before in the same run")
    variant: str = Field(default="", description="in a comparison: the variant it is a run of")
    seed: int | None = Field(default=None, description="in a comparison: the seed it runs with")

    @property
    def name(self) -> str:
        """Return the attempt's folder and MLflow run name, such as '1-baseline-bf16', or 'bf16-seed1' in a comparison."""
        again = f"-resumed-{self.resumption}" if self.resumption else ""
        return (f"{self.variant}-seed{self.seed}" if self.variant else f"{self.number}-{self.label}-{self.precision.label}") + again


class RuledOut(Record):
    """A precision that is not in the plan, and why."""

    precision: str
    reason: str


class PrecisionPlan(Record):
    """Attempts in order of trial: a retry only after a shortage of memory, a fallback only after a divergence."""

    attempts: tuple[Attempt, ...] = Field(min_length=1)
    reason: str
    ruled_out: tuple[RuledOut, ...] = ()
    levers: tuple[LeverEffect, ...] = Field(default=(), description="what each lever alone would free from the baseline")
    device_type: DeviceType = Field(default="cpu", description="that it was made for")


class ArtifactVersion(Record):
    """A folder whose bytes DVC keeps."""

    path: Path
    dvc_hash: str = Field(description="DVC's md5 of the folder, ending in '.dir'")
    size_bytes: int
    location: str = Field(description="what holds the bytes: 'dvc.lock:<stage>' or the checkpoint store's pointer")


class DatasetVersion(Record):
    """A prepared dataset: train.parquet and eval.parquet, with what was counted while making it."""

    version: ArtifactVersion
    num_train: int
    num_eval: int
    num_dropped: int = Field(description="prompts left out because they were too long")


class TrainingJob(Record):
    """What a training program is given (``attempt.json``)."""

    attempt: Attempt
    params: dict[str, Any] = Field(description="the resolved params, as dumped by tasks.params.Params")
    dataset_dir: Path
    base_model_dir: Path
    attempt_dir: Path


class ObservedPrecision(Record):
    """Dtypes seen in the tensors of the steps that trained, by hooks on the model's linear layers."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]
    rollout: tuple[str, ...] = Field(description="of the weights that sampled")
    rollout_head: tuple[str, ...] = Field(default=(), description="of the logits that were sampled from")
    trainable_weights: tuple[str, ...]
    scaler_live: bool


class Failure(Record):
    """Why an attempt did not succeed."""

    phase: Phase | None
    error_type: str
    message: str
    rank: int | None = Field(default=None, description="of several processes, the one that failed first; null: one process, or all alike")
    requested_bytes: int | None = None
    available_bytes: int | None = None
    log_tail: str = ""


class TrainingWarning(Record):
    """Something that a run can live with and its reader must know."""

    name: str = Field(description="such as 'clipped_completions'; a tag in MLflow")
    step: int = Field(description="optimizer step at which it was first seen")
    message: str


class Outcome(Record):
    """The result of one attempt (``outcome.json``)."""

    status: Status
    shortage: ShortageKind | None = None
    observed: ObservedPrecision | None = None
    final_loss_scale: float | None = None
    skipped_steps: int = 0
    peak_memory_bytes: int | None = Field(default=None, description="of the training process on its device, beyond its imports")
    peak_memory_by_device: tuple[int, ...] = Field(default=(), description="of several processes, by rank; 0 where one left no outcome")
    first_step: int = Field(default=0, description="steps already done in the training state this attempt went on from")
    steps_done: int = 0
    total_steps: int = 0
    step_time_ms: float | None = Field(default=None, description="median over the attempt's steps, the first left out")
    tokens_per_second: float | None = Field(default=None, description="median over the attempt's steps, the first left out")
    weights_changed: bool | None = None
    checkpoint_dir: Path | None = None
    last_state_dir: Path | None = Field(default=None, description="the newest whole training state, for a resume")
    process_seconds: float | None = Field(default=None, description="of the training process, from its start to its end")
    failure: Failure | None = None
    warnings: tuple[TrainingWarning, ...] = ()

    @property
    def ending(self) -> str:
        """Return how the attempt ended and how far it came, such as 'ran out of device memory in forward, 3 of 100 steps'."""
        if self.status == "skipped":
            return "skipped, not tried"
        kind = f"{self.shortage} " if self.shortage else ""
        how = f"ran out of {kind}memory" if self.status == "out_of_memory" else self.status
        how += f" in {self.failure.phase}" if self.failure and self.failure.phase else ""
        how += f" of rank {self.failure.rank}" if self.failure and self.failure.rank is not None else ""
        start = f" from step {self.first_step}" if self.first_step else ""
        return f"{how}, {self.steps_done} of {self.total_steps} steps{start}"


class FinishedAttempt(Record):
    """An attempt together with what came of it."""

    attempt: Attempt
    outcome: Outcome
    attempt_dir: Path
    in_earlier_start: bool = Field(default=False, description="made before its run was stopped and gone on with")


class Accuracy(Record):
    """Share of problems solved, with a 95 % Wilson interval."""

    num_correct: int
    num_problems: int
    share: float
    low: float
    high: float
    mean_score: float


class SampledCompletion(Record):
    """One held-out problem with the answer before and after."""

    prompt: str
    expected: str
    before: str
    after: str
    score_before: float
    score_after: float


class Evaluation(Record):
    """Base against tuned model on the held-out set, problem by problem."""

    base: Accuracy
    tuned: Accuracy
    num_gained: int
    num_lost: int
    p_value: float = Field(description="two-sided exact McNemar test")
    samples: tuple[SampledCompletion, ...]


class SourceVersion(Record):
    """The code a run came from."""

    git_commit: str | None
    dirty: bool | None


class RunFolder(Record):
    """Where one run keeps its files."""

    name: str
    run_dir: Path
    started_at: str
    flow_run_id: str | None
    flow: str = Field(default="retrain", description="the flow it is a run of")
    source: SourceVersion
    changes: tuple[str, ...] = Field(default=(), description="what each resume set otherwise in the params, old -> new")


class TrackedRun(Record):
    """A run in MLflow."""

    tracking_uri: str
    experiment_id: str
    run_id: str


class RunSetting(Record):
    """What every step of a run after the decision works with."""

    run: RunFolder
    tracked: TrackedRun
    hardware: Hardware
    plan: PrecisionPlan
    base_model: ArtifactVersion
    dataset: DatasetVersion

    @property
    def run_name(self) -> str:
        """Return the run's name."""
        return self.run.name


class RunRecord(RunSetting):
    """A whole run, written to ``run.json`` and logged to MLflow."""

    status: Status
    params: dict[str, Any]
    attempts: tuple[FinishedAttempt, ...]
    lost_steps: int = Field(default=0, description="steps done again, since an attempt went on from an earlier training state")
    lost_tokens: int = Field(default=0, description="prompt and completion tokens of those steps")
    evaluation: Evaluation | None = None
    checkpoint: ArtifactVersion | None = None
