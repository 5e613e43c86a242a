"""Copies between host and device, and operations that make tensors on one of them: what PyTorch does on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.cuda import tensors
from tests.support.cuda.device import Layout
from tests.support.cuda.tensors import SPECIAL, DeviceTensor, aten, issue, meta_of, new


def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Tensor.copy_, at least one of them on the device."""
    if isinstance(target, DeviceTensor):
        if isinstance(source, DeviceTensor):
            issue(aten.copy_.default, (target, source), {}, None)
        elif target.numel():
            _to_device(target, source, non_blocking)
    elif target.numel():
        _to_host(target, source, non_blocking)
    return target


def copies(targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:
    """torch._foreach_copy_ between host and device: PyTorch copies one after another."""
    for target, source in zip(targets, sources, strict=True):
        copy(target, source, non_blocking)


def _straight(target: Tensor, source: Tensor) -> bool:
    """Whether the bytes go over as they are; otherwise PyTorch makes temporaries."""
    if target.dtype != source.dtype or target.shape != source.shape:
        return False
    if target.is_contiguous() and source.is_contiguous():
        return True
    return target.stride() == source.stride() and _dense(target)


def _dense(tensor: Tensor) -> bool:
    return bool(aten.is_non_overlapping_and_dense.default(meta_of(tensor)))


def _to_device(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    device = tensors.device
    if not _straight(target, source):  # by a temporary on the host, laid out as the target
        source = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype).copy_(source)
    there, here = Layout.of(target), Layout.of(source)
    if device.host.reaches(here.address, source.nbytes):
        # It is read when the copy runs. Torch's pool keeps pinned memory until then; registered memory is its owner's.
        kept = source.detach() if device.host.pools(here.address) else None
        device.give(lambda: (device.at(there).copy_(device.host.at(here)), kept))
        if not non_blocking:
            device.synchronize_current("copy to the device")
        return
    value = source.detach().clone()  # the driver has read it when it returns
    device.give(lambda: device.at(there).copy_(value))
    device.synchronize_current("copy of pageable memory to the device", seen=not non_blocking)


def _to_host(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    device = tensors.device
    if not _straight(target, source):
        if non_blocking:
            raise RuntimeError("a copy to the host in another layout, from a temporary that nobody has filled yet")
        source = source.expand(target.shape).contiguous()
    there, here = Layout.of(source), Layout.of(target)
    if non_blocking and device.host.reaches(here.address, target.nbytes):
        device.give(lambda: device.host.at(here).copy_(device.at(there)))
        return
    what = "copy to pageable memory of the host" if non_blocking else "copy to the host"
    device.synchronize_current(what, seen=not non_blocking)
    if not device.dry:
        with torch.no_grad():
            target.copy_(device.at(there))


def to_copy(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """Tensor.to of a tensor of the device."""
    shape = aten._to_copy.default(meta_of(tensor), dtype=dtype or tensor.dtype, memory_format=memory_format)
    if device is None or torch.device(device).type == "cuda":
        return copy(new(shape.size(), shape.stride(), shape.dtype), tensor)
    if shape.dtype != tensor.dtype:
        tensor = to_copy(tensor, dtype=shape.dtype)
    return copy(torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype), tensor, non_blocking)


def clone(tensor: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    """Tensor.clone"""
    shape = aten.clone.default(meta_of(tensor), memory_format=memory_format)
    return copy(new(shape.size(), shape.stride(), shape.dtype), tensor)


def _maker(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One that makes uninitialized memory beside a tensor, there or on the host."""

    def make(tensor: Tensor, *args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Tensor:
        shape = func(meta_of(tensor), *args, **kwargs)
        if device is not None and torch.device(device).type == "cpu":
            return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
        return new(shape.size(), shape.stride(), shape.dtype)

    return make


SPECIAL |= {
    aten.copy_.default: copy,
    aten._foreach_copy_.default: copies,
    aten._to_copy.default: to_copy,
    aten.clone.default: clone,
    aten.empty_like.default: _maker(aten.empty_like.default),
    aten.new_empty.default: _maker(aten.new_empty.default),
    aten.new_empty_strided.default: _maker(aten.new_empty_strided.default),
    aten._fused_sdp_choice.default: lambda *args, **kwargs: int(torch.nn.attention.SDPBackend.MATH),
    aten.is_pinned.default: lambda tensor, device=None: False,
}
