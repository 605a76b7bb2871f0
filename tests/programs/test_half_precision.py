"""fp16 on a CPU has a tensor core's numerics: fp16 in, fp32 accumulate, fp16 out, overflow and underflow included (P1)."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.programs.half_precision import cpu_has_fp16_units, fast_fp16_matmul, read_head_once

pytestmark = pytest.mark.skipif(cpu_has_fp16_units(), reason="this CPU computes fp16 itself")


def test_products_are_those_of_fp32_rounded_once() -> None:
    torch.manual_seed(0)
    left, right, bias = torch.randn(64, 300).half(), torch.randn(300, 48).half(), torch.randn(48).half()
    batch = torch.randn(4, 16, 300).half()
    exact = left.float() @ right.float()
    with fast_fp16_matmul(), torch.no_grad():
        out = torch.empty(64, 48, dtype=torch.half)
        assert torch.mm(left, right, out=out) is out
        results = {"mm": left @ right, "mm.out": out, "linear": torch.nn.functional.linear(left, right.T.contiguous())}
        assert torch.equal(torch.addmm(bias, left, right), (bias.float() + exact).half())
        assert torch.equal(torch.bmm(batch, right.expand(4, -1, -1)), torch.bmm(batch.float(), right.float().expand(4, -1, -1)).half())
    for name, result in results.items():
        assert torch.equal(result, exact.half()), name


def test_accumulation_is_in_fp32() -> None:
    ones = torch.ones(1, 4096).half()
    with fast_fp16_matmul():
        # fp16 cannot count beyond 2048 in steps of 1
        assert (ones @ ones.T).item() == 4096


def test_overflow_is_inf_and_underflow_is_zero_as_on_a_card() -> None:
    with fast_fp16_matmul():
        assert torch.isinf(torch.tensor([[300.0]]).half() @ torch.tensor([[300.0]]).half())
        assert (torch.tensor([[1e-4]]).half() @ torch.tensor([[1e-4]]).half()).item() == 0


def test_forward_and_backward_of_autocast_are_redirected() -> None:
    torch.manual_seed(0)
    layer, inputs = torch.nn.Linear(32, 8), torch.randn(4, 32)
    with fast_fp16_matmul():
        with torch.autocast("cpu", dtype=torch.float16):
            output = layer(inputs)
        output.float().sum().backward()
    assert output.dtype == torch.float16 and layer.weight.grad is not None
    assert torch.equal(layer.weight.grad[0], (torch.ones(1, 4) @ inputs.half().float()).half().float()[0])


def test_other_dtypes_and_devices_are_left_alone() -> None:
    left, right = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    with fast_fp16_matmul():
        assert (left @ right).dtype == torch.bfloat16
        assert (left.float() @ right.float()).dtype == torch.float32


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
