"""Operations whose results are laid out otherwise than torch's fake tensors have it, and how they are.

Sizes and strides of fakes decide what traced code does and what its bytes are predicted to be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    compute_elementwise_output_strides,
    elementwise_dtypes,
    suggest_memory_format,
)
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten

Usual = Callable[[], Any]
Arguments = Sequence[Any]
Named = Mapping[str, Any]


@functools.cache
def knows(func: Any) -> bool:
    """Whether `true_result` may say something else of `func`."""
    return func in _KNOWN or (torch.Tag.pointwise in func.tags and not func._schema.is_mutable)


def true_result(func: Any, usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """What `func` makes of fake arguments, within their mode; `usual()` is what torch's fakes make of them."""
    return _KNOWN.get(func, _pointwise)(usual, args, kwargs)


def _pointwise(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """Laid out as the arguments are that come. What was expanded lies in one piece once it is converted, in an order of
    its own: fakes convert whatever is computed in another dtype, kernels only what is of another dtype than the rest,
    and on the CPU alone."""
    made = usual()
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    given = [tensor for tensor in tensors if tensor.dim()]
    if not isinstance(made, torch.Tensor) or len(tensors) < 2 or all(tensor.is_contiguous() for tensor in given):
        return made
    if made.device.type == "cpu":
        _, common = elementwise_dtypes(*tensors, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
        given = [tensor if tensor.dtype in (common, torch.bool) else tensor.to(common) for tensor in given]
    strides = compute_elementwise_output_strides(*(tensor.expand(made.shape) for tensor in given))
    return made if strides == made.stride() else made.new_empty_strided(made.shape, strides)


def _input_first(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """The kernel looks at what was the input first, and then at the gradient."""
    return _pointwise(usual, (args[1], args[0]), kwargs)


def _in_order(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """In order, whatever the argument's layout; fakes keep it."""
    return torch.empty_like(usual(), memory_format=torch.contiguous_format)


def _bincount(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """Where code says how many kinds there are, as a mixture's auxiliary loss does of its experts, the count is as
    long; how many there are in truth depends on data, which a fake has not."""
    given = dict(zip(("self", "weights", "minlength"), args, strict=False)) | dict(kwargs)
    if not given.get("minlength") or given.get("weights") is not None:
        return usual()
    return torch.empty(given["minlength"], dtype=torch.int64, device=given["self"].device)


def _native_dropout_backward(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """On the CPU a product; fakes have CUDA's layout."""
    return args[0] * args[1] if args[0].device.type == "cpu" else usual()


def _col2im(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """What is folded keeps memory as large as the columns."""
    made = usual()
    return torch.empty_like(args[0]).as_strided(made.shape, made.stride())


def _copy(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """A copy of all the memory under the first argument, of which it may be a part."""
    into, made = args[0], usual()
    size = into.untyped_storage().nbytes() // into.element_size()
    if size < made.untyped_storage().nbytes() // made.element_size() or made.stride() != into.stride():
        return made
    return into.new_empty(size).as_strided(into.shape, into.stride(), into.storage_offset())


def _batch_norm(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """On the CPU in order, whatever the input's layout; fakes have CUDA's, which keeps it."""
    made = usual()
    if made[0].device.type != "cpu":
        return made
    return (torch.empty_like(made[0], memory_format=suggest_memory_format(made[0])), *made[1:])


def _convolution_backward(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """On the CPU the weight's gradient comes with the bias's, asked for or not."""
    made, weight, wanted = usual(), args[2], args[10]
    if weight.device.type == "cpu" and wanted[2] and not wanted[1]:
        return made[0], torch.empty_like(weight), made[2]
    return made


def _layer_norm_backward(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """On the CPU in order, whatever the gradient's layout; fakes keep it."""
    made = usual()
    if args[0].device.type != "cpu" or made[0] is None:
        return made
    return (torch.empty_like(made[0], memory_format=torch.contiguous_format), *made[1:])


_KNOWN: dict[Any, Callable[[Usual, Arguments, Named], Any]] = {
    _aten.bincount.default: _bincount,
    _aten.threshold_backward.default: _input_first,
    _aten.leaky_relu_backward.default: _input_first,
    _aten.elu_backward.default: _pointwise,
    _aten.softplus_backward.default: _pointwise,
    _aten.mish_backward.default: _pointwise,
    _aten.hardtanh_backward.default: _pointwise,
    _aten.hardsigmoid_backward.default: _pointwise,
    _aten.hardswish_backward.default: _pointwise,
    _aten.mse_loss_backward.default: _in_order,
    _aten.smooth_l1_loss_backward.default: _in_order,
    _aten.huber_loss_backward.default: _in_order,
    _aten.masked_fill.Scalar: _in_order,
    _aten.masked_fill.Tensor: _in_order,
    _aten.pow.Scalar: _in_order,
    _aten.float_power.Scalar: _in_order,
    _aten.native_dropout_backward.default: _native_dropout_backward,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.col2im.default: _col2im,
    _aten.copy.default: _copy,
    _aten.native_batch_norm.default: _batch_norm,
    _aten._native_batch_norm_legit.default: _batch_norm,
    _aten._native_batch_norm_legit.no_stats: _batch_norm,
    _aten._native_batch_norm_legit_functional.default: _batch_norm,
    _aten._batch_norm_with_update_functional.default: _batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm,
    _aten.batch_norm_backward.default: _batch_norm,
}
