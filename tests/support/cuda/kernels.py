"""What a card's kernels allocate for themselves beside their results, where `Device.scratch` says that they do so.

The sizes are those of PyTorch's CUDA sources (flash_attn/flash_api.cpp, attention_backward.cu, Reduce.cuh), which an
H100's answers bear out (benchmarks/results/card/2026-11-26-h100-facts.json).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.cuda import tensors
from tests.support.cuda.tensors import SPECIAL, aten

Sizes = tuple[list[int], list[int]]
"""In bytes: of what comes before the results, and of what comes after them."""

_FLASH = aten._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
_LOG_SIGMOID_BACKWARD = aten.log_sigmoid_backward.default
_MATH = torch.nn.functional.scaled_dot_product_attention
_PART_BYTES = 2**20
multiprocessors = 16


def scratch(func: Any, args: Sequence[Any]) -> Sizes:
    """Of a call."""
    sizes = _TABLE.get(func)
    return sizes(*args) if sizes is not None else ([], [])


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention`, by flash's kernels in bf16 without mask and dropout."""
    if query.dtype != torch.bfloat16 or attn_mask is not None or dropout_p:
        return _MATH(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]


def flash(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`_scaled_dot_product_flash_attention`, whose numbers are the CPU's."""
    causal = bool(args[1]) if len(args) > 1 else bool(kwargs.get("is_causal", False))

    def kernel(q: Tensor, k: Tensor, v: Tensor, *_: Any, scale: float | None = None, **__: Any) -> list[Tensor]:
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        none = torch.zeros(2, dtype=torch.uint64)
        return [out, logsumexp, none, none[0], q.new_empty(0)]

    return tensors._make(_FLASH, (q, k, v, *args), kwargs, kernel)


def flash_backward(*args: Any, **kwargs: Any) -> Any:
    """`_scaled_dot_product_flash_attention_backward`, likewise."""

    def kernel(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, *rest: Any, scale: Any = None
    ) -> tuple[Tensor, ...]:
        given = grad, q, k, v, out, logsumexp, 0.0, rest[5]
        return tuple(aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, scale=scale))

    return tensors._make(_FLASH_BACKWARD, args, kwargs, kernel)


def log_sigmoid_backward(*args: Any) -> Any:
    """`log_sigmoid_backward`, which on a card gets an empty buffer, on the CPU one of its forward's."""

    def kernel(grad: Tensor, x: Tensor, _: Tensor) -> Tensor:
        return aten.log_sigmoid_backward(grad, x, aten.log_sigmoid_forward(x)[1])

    return tensors._make(_LOG_SIGMOID_BACKWARD, args, {}, kernel)


def _of_flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *_: Any) -> Sizes:
    """dq in fp32, a part for each of so many splits where only one order of adding is allowed; dk and dv of all heads
    where heads are grouped; copies of what is not contiguous as [batch, length, heads, width]."""
    batch, heads, length, width = q.shape
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    splits = math.ceil(multiprocessors / (batch * heads)) if strict else 1
    rows, columns = _up(length, 128), _up(width, 32 if width <= 128 else 64)
    copies = [t.numel() * t.element_size() for t in (grad, out) if not t.transpose(1, 2).is_contiguous()]
    sums = [4 * batch * heads * rows, 4 * splits * batch * rows * heads * columns]
    expanded = [batch * k.shape[2] * heads * width * k.element_size()] * 2 if k.shape[1] != heads else []
    return copies, [*sums, *expanded]


def _of_sum(x: Tensor, dims: Sequence[int] | None = None, *_: Any) -> Sizes:
    """A part for each multiprocessor where rows are added up, and what they count with."""
    over_rows = dims is not None and x.dim() > 1 and x.dim() - 1 not in [d % x.dim() for d in dims]
    return [], [multiprocessors * min(_PART_BYTES, 4 * x.numel()), 512] if over_rows else []


def _of_embedding_backward(grad: Tensor, ids: Tensor, *_: Any) -> Sizes:
    """Sorted ids, and in fp32 a row for each, and for each ten of them."""
    count = ids.numel()
    return [], [8 * count, 8 * count, 4 * (count + count // 10) * grad.shape[-1]] if count > 3072 else []


def _of_index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, **_: Any) -> Sizes:
    """A copy of what is added, to multiply it, where only one order of adding is allowed."""
    return [source.nbytes] if torch.are_deterministic_algorithms_enabled() else [], []


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


_TABLE: Mapping[Any, Callable[..., Sizes]] = {
    _FLASH_BACKWARD: _of_flash_backward,
    aten.index_add_.default: _of_index_add,
    aten.sum.dim_IntList: _of_sum,
    aten.embedding_dense_backward.default: _of_embedding_backward,
}
tensors.SCRATCH = scratch
SPECIAL |= {_FLASH: flash, _FLASH_BACKWARD: flash_backward, _LOG_SIGMOID_BACKWARD: log_sigmoid_backward}
