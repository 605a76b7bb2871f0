"""A few layers tell what many take: the same peaks as a count of every layer."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config

from tasks.peak_memory import PeakRequest
from tasks.programs import dry_run
from tasks.records import MemoryLevers
from tests.training_runs import precision

DEEP = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=9,
    num_attention_heads=4,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=1,
)


def request(label: str, device_type: str = "cpu", **levers: Any) -> PeakRequest:
    pulled = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "gradient_checkpointing": False, **levers}
    asked = {"device_type": device_type, "precision": precision(label), "levers": MemoryLevers(**pulled), "beta": 0.1}
    return PeakRequest.model_validate({**asked, "prompt_length": 24, "completion_length": 16})


@pytest.mark.parametrize(
    ("label", "levers"),
    [
        ("bf16", {}),
        ("fp32", {"gradient_checkpointing": True}),
        ("fp16", {"lora_rank": 8}),
        ("bf16", {"optimizer_8bit": True, "device_type": "cuda", "gradient_checkpointing": True}),
    ],
)
def test_peaks_from_a_few_layers_are_those_of_all(label: str, levers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(label, **levers)
    whole = dry_run._count(DEEP, asked)
    counted: list[int] = []
    real = dry_run._count

    def noted(config: LlamaConfig, request: PeakRequest) -> Any:
        counted.append(config.num_hidden_layers)
        return real(config, request)

    monkeypatch.setattr(dry_run, "_count", noted)
    found = dry_run.dry_run(DEEP, asked)
    assert counted == [3, 4] and found.cache_elements == whole.cache_elements
    for phase, moments in whole.moments.items():
        peak = max(moment.total for moment in moments)
        assert peak <= sum(found.phases[phase].values()) <= 1.03 * peak, phase


def test_a_model_whose_layers_differ_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def noted(config: Qwen2Config, request: PeakRequest) -> dry_run._Count:
        counted.append(config.num_hidden_layers)
        return dry_run._Count({}, 0)

    monkeypatch.setattr(dry_run, "_count", noted)
    sizes = {name: getattr(DEEP, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    layers = ["full_attention", "sliding_attention"] * 3
    mixed = Qwen2Config(**sizes, num_hidden_layers=6, num_key_value_heads=4, layer_types=layers, use_sliding_window=True)
    dry_run.dry_run(mixed, request("fp32"))
    assert counted == [6]


class WatchedCache(DynamicCache):  # type: ignore[misc]
    """Notes the bytes of all storages that its layers keep."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        result = super().update(*args, **kwargs)
        self.noted = [*getattr(self, "noted", []), held_bytes([layer for layer in self.layers if layer.is_initialized])]
        return result


def held_bytes(layers: list[Any]) -> int:
    return sum(tensor.untyped_storage().nbytes() for layer in layers for tensor in (layer.keys, layer.values))


@pytest.mark.parametrize(("window", "prompt"), [(8, 4), (38, 24), (64, 24)])
def test_the_cache_of_a_sliding_window_takes_what_generating_keeps(window: int, prompt: int) -> None:
    sizes = {name: getattr(DEEP, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    kinds = {"layer_types": ["full_attention", *["sliding_attention"] * 5], "use_sliding_window": True, "sliding_window": window}
    windowed = Qwen2Config(**sizes, num_hidden_layers=6, num_key_value_heads=4, **kinds)
    policy, cache = AutoModelForCausalLM.from_config(windowed, attn_implementation="eager").eval(), WatchedCache(config=windowed)
    prompts = torch.ones(8, prompt, dtype=torch.long)
    lengths = {"min_new_tokens": 40 - prompt, "max_new_tokens": 40 - prompt, "pad_token_id": 0}
    policy.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), cache=cache, **lengths)
    asked = request("fp32").model_copy(update={"prompt_length": prompt, "completion_length": 40 - prompt})
    count = dry_run._count(windowed, asked)
    taken = [moment.alive.get("kv_cache", 0) for moment in count.moments["rollout"]]
    # while a layer's cache is replaced the old one stands beside it
    assert taken[-1] == cache.noted[-1] and max(taken) <= max(cache.noted) + held_bytes(cache.layers[:1])
    assert count.cache_elements == (39 + 5 * min(39, window - 1)) * 8 * 2 * DEEP.hidden_size


def test_moments_that_are_not_in_the_deeper_model_are_not_made_up() -> None:
    these = [dry_run.Moment("activations", size * 4096, {}) for size in (1, 2, 3)]
    with pytest.raises(dry_run._Unlike):
        dry_run._followed(these, [these[0], these[2], these[1]])
