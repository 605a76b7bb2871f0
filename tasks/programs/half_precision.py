"""16-bit matrix products on a CPU without units for them, with the numerics of a tensor core and at useful speed.

A tensor core multiplies 16-bit inputs, adds up in fp32 and rounds the result to 16 bits. The same is done here: inputs already
rounded are widened, multiplied in fp32 and the result is rounded. Where oneDNN does not take a format (fp16 without avx512_fp16,
bf16 with AVX2 alone), torch's own kernels do the product in software, 10 to 50 times slower than fp32.
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
    """Redirect matrix products of CPU tensors of `dtypes` to fp32 and round their result to the tensors' own."""

    def __init__(self, dtypes: frozenset[torch.dtype]) -> None:
        super().__init__()
        self._dtypes = dtypes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func not in _PRODUCTS:
            return func(*args, **options)
        kinds = {(arg.dtype, arg.device.type) for arg in args if isinstance(arg, torch.Tensor)}
        dtype, device = kinds.pop()
        if kinds or dtype not in self._dtypes or device != "cpu":
            return func(*args, **options)
        widened = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
        out = options.pop("out", None)
        if out is None:
            return func(*widened, **options).to(dtype)
        return out.copy_(func(*widened, **options, out=torch.empty(out.shape)))


def read_head_once(model: PreTrainedModel) -> RemovableHandle:
    """Let the language-model head see a contiguous input, until the handle is removed.

    The last position of each prompt is a strided view, for which torch multiplies in batches: a CPU then copies the head's
    16-bit weights once for every row (SmolLM2-135M, 32 prompts: 1.8 GB in bf16, 3.5 GB in fp16).
    """

    def contiguous(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.contiguous() for tensor in inputs)

    return model.get_output_embeddings().register_forward_pre_hook(contiguous)


def cpu_computes(dtype: str) -> bool:
    """Return whether oneDNN multiplies tensors of `dtype` ('float32', 'float16' or 'bfloat16') on this CPU."""
    if dtype == "float32":
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    onednn = torch.ops.mkldnn
    return bool(onednn._is_mkldnn_fp16_supported() if dtype == "float16" else onednn._is_mkldnn_bf16_supported())


def fast_half_matmul(device_type: str, *dtypes: str) -> AbstractContextManager[Any]:
    """Compute in fp32 the products of those of `dtypes` that this CPU does not multiply itself; on another device do nothing."""
    slow = frozenset(getattr(torch, dtype) for dtype in dtypes if not cpu_computes(dtype)) if device_type == "cpu" else None
    return _WidenedProducts(slow) if slow else nullcontext()
