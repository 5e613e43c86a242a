"""Corrects the strides and storages of fake results for operations where torch's fake tensors get them wrong.

They decide what traced code does and how many bytes are predicted for it.
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
    """Whether `true_result` may differ from torch's own fake result for `func`."""
    return func in _KNOWN or (torch.Tag.pointwise in func.tags and not func._schema.is_mutable)


def true_result(func: Any, usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """The fake result of `func` for fake arguments, laid out as the real result would be. Called inside the arguments'
    fake mode; `usual()` gives torch's own fake result."""
    return _KNOWN.get(func, _pointwise)(usual, args, kwargs)


def _pointwise(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """An elementwise operation: the result's strides follow from those of the arguments as the kernel reads them. An
    expanded argument that is converted to another dtype becomes dense, in an order of its own. Torch's fake tensors
    convert every argument if the operation computes in another dtype. Kernels convert only arguments whose dtype is
    not the common one, and only on the CPU."""
    fake = usual()
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    arrays = [tensor for tensor in tensors if tensor.dim()]
    if not isinstance(fake, torch.Tensor) or len(tensors) < 2 or all(tensor.is_contiguous() for tensor in arrays):
        return fake
    if fake.device.type == "cpu":
        _, common = elementwise_dtypes(*tensors, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
        arrays = [tensor if tensor.dtype in (common, torch.bool) else tensor.to(common) for tensor in arrays]
    strides = compute_elementwise_output_strides(*(tensor.expand(fake.shape) for tensor in arrays))
    return fake if strides == fake.stride() else fake.new_empty_strided(fake.shape, strides)


def _input_first(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """An elementwise backward whose kernel looks at the strides of the forward's input first, and then at those of the
    gradient."""
    return _pointwise(usual, (args[1], args[0]), kwargs)


def _in_order(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """The result is contiguous, whatever the argument's layout. Torch's fakes keep that layout."""
    return torch.empty_like(usual(), memory_format=torch.contiguous_format)


def _bincount(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """`bincount`: if code passes `minlength`, as a mixture's auxiliary loss passes the number of its experts, the
    result gets this length. The true length depends on data, which fake tensors do not have."""
    arguments = dict(zip(("self", "weights", "minlength"), args, strict=False)) | dict(kwargs)
    if not arguments.get("minlength") or arguments.get("weights") is not None:
        return usual()
    return torch.empty(arguments["minlength"], dtype=torch.int64, device=arguments["self"].device)


def _native_dropout_backward(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """On the CPU the result is laid out as a product of gradient and mask. Torch's fakes have CUDA's layout."""
    return args[0] * args[1] if args[0].device.type == "cpu" else usual()


def _col2im(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """`col2im`: the folded result lies in a storage as large as that of the columns."""
    fake = usual()
    return torch.empty_like(args[0]).as_strided(fake.shape, fake.stride())


def _copy(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """`copy`: the result is a part of a copy of the whole storage under the first argument, at the same place in it."""
    into, fake = args[0], usual()
    size = into.untyped_storage().nbytes() // into.element_size()
    if size < fake.untyped_storage().nbytes() // fake.element_size() or fake.stride() != into.stride():
        return fake
    return into.new_empty(size).as_strided(into.shape, into.stride(), into.storage_offset())


def _batch_norm(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """On the CPU the result is contiguous in its memory format, whatever the input's strides. Torch's fakes have CUDA's
    layout, which keeps the input's."""
    fakes = usual()
    if fakes[0].device.type != "cpu":
        return fakes
    return (torch.empty_like(fakes[0], memory_format=suggest_memory_format(fakes[0])), *fakes[1:])


def _convolution_backward(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """On the CPU the kernel makes the weight's gradient whenever it makes the bias's, asked for or not."""
    fakes, weight, wanted = usual(), args[2], args[10]
    if weight.device.type == "cpu" and wanted[2] and not wanted[1]:
        return fakes[0], torch.empty_like(weight), fakes[2]
    return fakes


def _layer_norm_backward(usual: Usual, args: Arguments, kwargs: Named) -> Any:
    """On the CPU the result is contiguous, whatever the gradient's layout. Torch's fakes keep that layout."""
    fakes = usual()
    if args[0].device.type != "cpu" or fakes[0] is None:
        return fakes
    return (torch.empty_like(fakes[0], memory_format=torch.contiguous_format), *fakes[1:])


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
