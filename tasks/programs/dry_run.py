"""Go through one GRPO step on fake tensors and count what is alive in each phase; no weights are loaded, nothing is computed.

The step is one from the second on: optimizer states are there. The model, its dtypes, autocast, checkpointing, TRL's fused head
and the rollout's copy are the real ones; only the sampling and GRPO's small tensors are written out again.
"""

import contextlib
import copy
import gc
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from bitsandbytes.optim import AdamW, GlobalOptimManager
from peft import PeftModel, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from tasks.peak_memory import PeakRequest, TensorBytes
from tasks.programs.adapters import lora_config
from tasks.programs.grpo import cast_copy
from tasks.programs.half_precision import fast_half_matmul, read_head_once
from tasks.records import MemoryLevers, Phase

# layers of these models differ in nothing, so that a few of them tell what all of them take
LIKE_LAYERS = frozenset({"llama", "qwen2", "qwen3"})
FEW_LAYERS = 3
# so many allocations alike in a row are the same part of the step, where less is such as the norms of all weights, a number for each
SURE, NEGLIGIBLE_BYTES = 12, 4096


class _FakeTensors(FakeTensorMode):  # type: ignore[misc]
    def __deepcopy__(self, memo: dict[int, Any]) -> "_FakeTensors":
        # a copied model's tensors must stay in the mode of the original's
        return self


class Moment(NamedTuple):
    """A storage was made: its category and size, and what is alive with it, bytes by category."""

    category: str
    size: int
    alive: dict[str, int]

    @property
    def total(self) -> int:
        """Return all bytes alive."""
        return sum(self.alive.values())


class Ledger(TorchDispatchMode):  # type: ignore[misc]
    """Follows every tensor's storage from the operation that makes it to its end; `moments` holds those of each phase in order."""

    def __init__(self, head_widths: frozenset[int]) -> None:
        super().__init__()
        self.category = "activations"
        self.moments: dict[Phase, list[Moment]] = {}
        self._phase: Phase = "load"
        self._head_widths = head_widths
        self._held: dict[int, tuple[str, int]] = {}
        self._live: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                wide = leaf.dim() > 1 and leaf.shape[-1] in self._head_widths
                self._hold(leaf, "logits" if wide and self.category == "activations" else self.category)
        return result

    def enter(self, phase: Phase) -> None:
        """Count what is alive from here on to another phase."""
        # modules and their hooks lie in reference cycles, and what they hold must not stay by chance
        gc.collect()
        self._phase = phase
        self._note("", 0)

    def mark(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Say what tensors are, if it was not known when they were made."""
        for tensor in tensors:
            self._hold(tensor, category)
            key = id(tensor.untyped_storage())
            if key in self._held:
                known, size = self._held[key]
                self._live[known] -= size
                self._live[category] += size
                self._held[key] = (category, size)

    def _hold(self, tensor: torch.Tensor, category: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._held or not storage.nbytes():
            return
        self._held[key] = (category, storage.nbytes())
        self._live[category] += storage.nbytes()
        weakref.finalize(storage, self._free, key)
        self._note(category, storage.nbytes())

    def _free(self, key: int) -> None:
        category, size = self._held.pop(key, ("", 0))
        self._live[category] -= size

    def _note(self, category: str, size: int) -> None:
        self.moments.setdefault(self._phase, []).append(Moment(category, size, {name: size for name, size in self._live.items() if size}))


class _MarkedCache(DynamicCache):  # type: ignore[misc]
    def __init__(self, ledger: Ledger, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self._ledger = ledger

    def update(self, *args: Any, **kwargs: Any) -> Any:
        kept = super().update(*args, **kwargs)
        self._ledger.mark(kept, "kv_cache")
        return kept


class _Count(NamedTuple):
    moments: dict[Phase, list[Moment]]
    cache_elements: int


def dry_run(config: PreTrainedConfig, request: PeakRequest) -> TensorBytes:
    """Return bytes alive by category at the peak of each phase."""
    depth = config.num_hidden_layers
    if depth > FEW_LAYERS + 1 and config.model_type in LIKE_LAYERS and len(set(getattr(config, "layer_types", None) or [""])) == 1:
        few, more = (_count(_with_depth(config, layers), request) for layers in (FEW_LAYERS, FEW_LAYERS + 1))
        with contextlib.suppress(_Unlike):
            return _extrapolated(few, more, depth - FEW_LAYERS)
    count = _count(config, request)
    peaks = {phase: max(moments, key=lambda moment: moment.total).alive for phase, moments in count.moments.items()}
    return TensorBytes(phases=peaks, cache_elements=count.cache_elements)


def _with_depth(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    smaller = copy.deepcopy(config)
    smaller.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        smaller.layer_types = config.layer_types[:layers]
    return smaller


def _extrapolated(few: _Count, more: _Count, layers: int) -> TensorBytes:
    """Return the peaks of a model with `layers` layers more than `few`'s, from its count and one with one layer more.

    What is alive at a moment is linear in the number of layers and in the layer's place, so that a peak lies in a first layer or a
    last: each moment is followed in the deeper model with the first layers as its own, and again with the last.
    """
    peaks: dict[Phase, dict[str, int]] = {}
    for phase, these in few.moments.items():
        those = more.moments[phase]
        pairs = _followed(these, those) + _followed(these[::-1], those[::-1])
        grown = [
            {
                name: one.alive.get(name, 0) + layers * (other.alive.get(name, 0) - one.alive.get(name, 0))
                for name in one.alive | other.alive
            }
            for one, other in pairs
        ]
        peaks[phase] = max(grown, key=lambda alive: sum(alive.values()))
    return TensorBytes(phases=peaks, cache_elements=few.cache_elements + layers * (more.cache_elements - few.cache_elements))


def _followed(these: list[Moment], those: list[Moment]) -> list[tuple[Moment, Moment]]:
    """Return each moment with the one of the deeper model that makes the same; where a loop over layers ends, a layer is passed over."""
    made, deeper = ([(moment.category, moment.size // NEGLIGIBLE_BYTES) for moment in moments] for moments in (these, those))
    pairs: list[tuple[Moment, Moment]] = []
    here = there = 0
    while here < len(these):
        if there < len(those) and made[here] == deeper[there]:
            pairs.append((these[here], those[there]))
            here, there = here + 1, there + 1
            continue
        window = made[here : here + SURE]
        passed = next((at for at in range(there + 1, len(those)) if deeper[at : at + SURE][: len(window)] == window), None)
        if passed is None:
            raise _Unlike
        there = passed
    return pairs


class _Unlike(Exception):
    """Two depths make different things."""


def _count(config: PreTrainedConfig, request: PeakRequest) -> _Count:
    """Go through the step with every layer of the model."""
    request = request.model_copy(update={"completion_length": request.levers.max_completion_length or request.completion_length})
    ledger = Ledger(frozenset({config.vocab_size, 32768}) - {config.hidden_size, config.intermediate_size})
    attention = "eager" if request.device_type == "cpu" else "sdpa"
    dtypes = request.precision.autocast_dtype, request.precision.sampling_dtype
    # garbage is left to Ledger.enter: collected at any moment it would make two counts differ
    gc.disable()
    with _FakeTensors(), ledger, fast_half_matmul(request.device_type, *dtypes):
        ledger.category = "weights"
        dtype = getattr(torch, request.precision.autocast_dtype) if request.levers.lora_rank else torch.float32
        # the model writes its own dtype into the config that it is made from
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention, dtype=dtype)
        loading: dict[Phase, list[Moment]] = {}
        if request.device_type == "cpu":
            loading["load"] = [Moment("", 0, _loading(model, config.dtype or dtype))]
        add_fused_lm_head(model, cast_lm_head_to_fp32=request.precision.lm_head_fp32, outputs=("log_probs", "entropy"))
        if request.levers.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if request.levers.lora_rank:
            model = _with_adapters(model, request.levers)
        ledger.category = "reference_model"
        # TRL loads it in fp32 and keeps it beside the policy; with adapters it is the policy without them
        reference = [torch.empty_like(weight) for weight in model.parameters()] if request.beta and not request.levers.lora_rank else []
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        ledger.category = "gradient_buckets"
        buckets = [torch.empty_like(weight) for weight in weights] if request.num_processes > 1 else []
        ledger.category = "activations"
        optimizer = _with_states(weights, model.get_input_embeddings() if request.levers.optimizer_8bit else None, ledger)
        ledger.moments.clear()
        with torch.no_grad():
            cache_elements = _rollout(model, request, ledger)
        model.train()
        ledger.enter("forward")
        if request.levers.gradient_accumulation_steps > 1:
            # as the micro-batch before leaves them
            for weight in weights:
                weight.grad = torch.empty_like(weight)
                ledger.mark([weight.grad], "gradients")
        _micro_batch(model, request, ledger)
        ledger.enter("optimizer")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    del reference, buckets
    gc.enable()
    return _Count({**loading, **ledger.moments}, cache_elements)


def _loading(model: PreTrainedModel, stored: torch.dtype) -> dict[str, int]:
    """Return what loading takes: weights that are cast stand beside the file, which is mapped whole and privately."""
    weights = list(model.parameters())
    file_bytes = sum(weight.numel() for weight in weights) * stored.itemsize if model.dtype != stored else 0
    return {"weights": sum(weight.nbytes for weight in weights), "base_model_file": file_bytes}


def _with_adapters(model: PreTrainedModel, levers: MemoryLevers) -> PeftModel:
    # peft moves what it makes, and a fake weight cannot be moved; the scale takes no memory
    with unset_fake_temporarily(), torch.device("meta"):
        adapted = get_peft_model(model, lora_config(levers, alpha=1.0))
    for layer in adapted.modules():
        if isinstance(layer, torch.nn.Linear) and layer.weight.is_meta:
            layer.weight = torch.nn.Parameter(torch.empty(layer.weight.shape))
    return adapted


def _with_states(weights: list[torch.nn.Parameter], embeddings: torch.nn.Module | None, ledger: Ledger) -> torch.optim.Optimizer:
    """Return an optimizer that has its states: in 8 bits if `embeddings` are given, which keep 32, and so a head tied to them."""
    optimizer = torch.optim.AdamW(weights) if embeddings is None else AdamW(weights)
    if embeddings is not None:
        # asked for 8 bits from the start it would look at the values of its tables
        optimizer.args.optim_bits, optimizer.name2qmap = 8, {name: torch.empty(256) for name in ("dynamic", "udynamic")}
        GlobalOptimManager.get_instance().register_module_override(embeddings, "weight", {"optim_bits": 32})
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    ledger.category = "optimizer_states"
    optimizer.step()
    ledger.category = "activations"
    optimizer.zero_grad()
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda weight: ledger.mark([weight.grad], "gradients"))
    return optimizer


def _rollout(model: PreTrainedModel, request: PeakRequest, ledger: Ledger) -> int:
    """Take the prompts and the last token of a completion: what lies between needs less than the latter. Return the cache's size."""
    ledger.enter("rollout")
    policy = model
    if (request.precision.mixed_precision, request.precision.sampling_dtype) != ("no", "float32"):
        ledger.category = "rollout_weights"
        policy = cast_copy(model, getattr(torch, request.precision.sampling_dtype))
        ledger.category = "activations"
    policy.eval()
    hook = read_head_once(policy)
    rows = min(request.levers.rollout_batch_size or request.levers.effective_batch_size, request.levers.effective_batch_size)
    cache = _MarkedCache(ledger, model.config)
    scores = _scores(policy, rows, request.prompt_length, 0, cache)
    before = request.prompt_length + max(request.completion_length - 2, 0)
    for layer in cache.layers:
        # as it stands one token earlier: layers with a window show one token less than that, of storages that hold no more
        layer.cumulative_length, shown = before - 1, min(before, getattr(layer, "sliding_window", before)) - 1
        layer.keys, layer.values = (old.new_empty(*old.shape[:2], shown, old.shape[3]) for old in (layer.keys, layer.values))
        token = layer.keys.new_empty(*layer.keys.shape[:2], 1, layer.keys.shape[3])
        ledger.mark(layer.update(token, token), "kv_cache")
    # SamplingRecorder keeps the scores of the last token while the next is made
    following = _scores(policy, rows, 1, before, cache)
    (following / 1.0).logsumexp(dim=-1)
    torch.softmax(following, dim=-1)
    del scores
    hook.remove()
    return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)


def _scores(policy: PreTrainedModel, rows: int, tokens: int, before: int, cache: DynamicCache) -> torch.Tensor:
    ids, mask = torch.zeros(rows, tokens, dtype=torch.long), torch.ones(rows, before + tokens, dtype=torch.long)
    out = type(policy).forward(policy, input_ids=ids, attention_mask=mask, cache=cache, use_cache=True, logits_to_keep=1)
    scores: torch.Tensor = out.logits[:, -1].to(dtype=torch.float32, copy=True)
    return scores


def _micro_batch(model: PreTrainedModel, request: PeakRequest, ledger: Ledger) -> None:
    ids = torch.zeros(request.levers.per_device_train_batch_size, request.prompt_length + request.completion_length, dtype=torch.long)
    labels = ids.clone()
    labels[:, : request.prompt_length] = -100
    half = request.precision.autocast_dtype
    with torch.autocast("cpu", dtype=getattr(torch, half) if half != "float32" else torch.bfloat16, enabled=half != "float32"):
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
    log_probs = out.log_probs[:, -request.completion_length :]
    ratio = torch.exp(log_probs - log_probs.detach())
    loss = -torch.min(ratio, torch.clamp(ratio, 0.8, 1.2)).sum()
    del out
    ledger.enter("backward")
    loss.backward()
