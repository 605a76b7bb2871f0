"""fp16 matrix products on a CPU without fp16 units, with the numerics of a tensor core and at useful speed.

A tensor core multiplies fp16 inputs, adds up in fp32 and rounds the result to fp16. The same is done here: inputs already
rounded to fp16 are widened, multiplied in fp32 and the result is rounded. torch's own CPU kernels for fp16 do the
product in software, 10 to 50 times slower.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

_aten = torch.ops.aten
_PRODUCTS: frozenset[Any] = frozenset(
    {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.mm.out, _aten.addmm.out, _aten.bmm.out}
)


class _WidenedProducts(TorchDispatchMode):  # type: ignore[misc]
    """Redirect matrix products of fp16 CPU tensors to fp32 and round their result to fp16."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if func not in _PRODUCTS or any(tensor.dtype != torch.float16 or tensor.device.type != "cpu" for tensor in tensors):
            return func(*args, **options)
        widened = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
        out = options.pop("out", None)
        if out is None:
            return func(*widened, **options).half()
        return out.copy_(func(*widened, **options, out=torch.empty(out.shape)))


def read_head_once(model: PreTrainedModel) -> RemovableHandle:
    """Let the language-model head see a contiguous input, until the handle is removed.

    The last position of each prompt is a strided view, for which torch multiplies in batches: a CPU then copies the head's
    16-bit weights once for every row (SmolLM2-135M, 32 prompts: 1.8 GB in bf16, 3.5 GB in fp16).
    """

    def contiguous(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.contiguous() for tensor in inputs)

    return model.get_output_embeddings().register_forward_pre_hook(contiguous)


def cpu_has_fp16_units() -> bool:
    """Return whether oneDNN computes fp16 on this CPU in hardware."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def fast_fp16_matmul() -> AbstractContextManager[Any]:
    """Compute fp16 products of CPU tensors in fp32, unless the CPU has fp16 units."""
    return nullcontext() if cpu_has_fp16_units() else _WidenedProducts()
