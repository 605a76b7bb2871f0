"""16 bits on a CPU without units for them have a tensor core's numerics: fp32 accumulate, overflow and underflow included (P1)."""

import contextlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.programs.half_precision import cpu_computes, fast_half_matmul, read_head_once

needs_emulated_fp16 = pytest.mark.skipif(cpu_computes("float16"), reason="this CPU computes fp16 itself")


@pytest.fixture(params=["float16", "bfloat16"])
def emulated(request: pytest.FixtureRequest) -> torch.dtype:
    """Return a 16-bit dtype for which this CPU has no units."""
    if cpu_computes(request.param):
        pytest.skip(f"this CPU computes {request.param} itself")
    dtype: torch.dtype = getattr(torch, request.param)
    return dtype


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def test_products_are_those_of_fp32_rounded_once(emulated: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right, bias = torch.randn(64, 300).to(emulated), torch.randn(300, 48).to(emulated), torch.randn(48).to(emulated)
    batch = torch.randn(4, 16, 300).to(emulated)
    exact = left.float() @ right.float()
    with fast_half_matmul("cpu", name_of(emulated)), torch.no_grad():
        out = torch.empty(64, 48, dtype=emulated)
        assert torch.mm(left, right, out=out) is out
        results = {"mm": left @ right, "mm.out": out, "linear": torch.nn.functional.linear(left, right.T.contiguous())}
        assert torch.equal(torch.addmm(bias, left, right), (bias.float() + exact).to(emulated))
        products = torch.bmm(batch.float(), right.float().expand(4, -1, -1))
        assert torch.equal(torch.bmm(batch, right.expand(4, -1, -1)), products.to(emulated))
    for name, result in results.items():
        assert torch.equal(result, exact.to(emulated)), name


def test_accumulation_is_in_fp32(emulated: torch.dtype) -> None:
    ones = torch.ones(1, 4096, dtype=emulated)
    with fast_half_matmul("cpu", name_of(emulated)):
        # fp16 cannot count beyond 2048 in steps of 1, bf16 not beyond 256
        assert (ones @ ones.T).item() == 4096


@needs_emulated_fp16
def test_overflow_is_inf_and_underflow_is_zero_as_on_a_card() -> None:
    with fast_half_matmul("cpu", "float16"):
        assert torch.isinf(torch.tensor([[300.0]]).half() @ torch.tensor([[300.0]]).half())
        assert (torch.tensor([[1e-4]]).half() @ torch.tensor([[1e-4]]).half()).item() == 0


def test_forward_and_backward_of_autocast_are_redirected(emulated: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, inputs = torch.nn.Linear(32, 8), torch.randn(4, 32)
    with fast_half_matmul("cpu", name_of(emulated)):
        with torch.autocast("cpu", dtype=emulated):
            output = layer(inputs)
        output.float().sum().backward()
    assert output.dtype == emulated and layer.weight.grad is not None
    assert torch.equal(layer.weight.grad[0], (torch.ones(1, 4) @ inputs.to(emulated).float()).to(emulated).float()[0])


def test_other_dtypes_and_devices_are_left_alone() -> None:
    left, right = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    with fast_half_matmul("cpu", "float16"):
        assert (left @ right).dtype == torch.bfloat16
        assert (left.float() @ right.float()).dtype == torch.float32
    assert isinstance(fast_half_matmul("cuda", "float16", "bfloat16"), contextlib.nullcontext)
    assert isinstance(fast_half_matmul("cpu", "float32"), contextlib.nullcontext)


def test_without_onednn_every_16_bit_product_is_redirected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not cpu_computes("float16") and not cpu_computes("bfloat16") and cpu_computes("float32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_last_position_of_each_prompt_meets_the_heads_weights_once(dtype: torch.dtype) -> None:
    config = LlamaConfig(vocab_size=4096, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config).to(dtype).eval()
    seen: list[tuple[int, ...]] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default) and args[1].shape[-1] == config.vocab_size:
                seen.append(tuple(args[1].shape))
            return func(*args, **(kwargs or {}))

    ids = torch.zeros(8, 5, dtype=torch.long)
    with torch.no_grad():
        plain = model(ids, logits_to_keep=1).logits
        hook = read_head_once(model)
        with Products():
            once = model(ids, logits_to_keep=1).logits
        hook.remove()
    assert seen == [(64, 4096)]
    assert torch.allclose(plain, once, atol=1e-2)
    assert not model.lm_head._forward_pre_hooks
