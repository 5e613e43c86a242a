"""Packs the experts of a frozen mixture of experts in 4 bits. Their weights [experts, rows, columns] stay packed in
host memory and while they are copied, like those of linear layers (`planner.models.quantized`), and are unpacked whole
where the experts are computed.

By itself bitsandbytes quantizes no parameters outside linear layers. For others it has
`bitsandbytes.nn.parametrize.replace_parameter_4bit`. This module does the same with the same numbers, as each weight
is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils import parametrize

from planner.job.schema import Job
from planner.models.quantized import (
    computes_in,
    packed_bytes,
    parts_of_4bit,
    places_of_parts,
    sizes_of_4bit,
    unpacked_4bit,
)


class Unpacking(nn.Module):
    """The torch parametrization that unpacks a packed weight of experts whenever it is read, in its original shape and
    the dtype in which the experts compute."""

    def __init__(self, shape: Sequence[int], job: Job, code: Tensor) -> None:
        """`shape`: the weight's original shape. `code`: the numbers that the bytes of scales stand for if scales are
        quantized."""
        super().__init__()
        self.shape, self.kind, self.dtype = tuple(shape), job.bnb_4bit_quant_type, computes_in(job)
        self.nested = job.bnb_4bit_use_double_quant
        self.places = places_of_parts(sizes_of_4bit(_count(shape), nested=self.nested))
        self._then: Callable[[Tensor], Tensor] | None = None
        if self.nested:
            self.register_buffer("code", code, persistent=False)

    def forward(self, packed: Tensor) -> Tensor:
        """The weight unpacked from the bytes `packed`, and passed through the function that `followed_by` has set, if
        any."""
        parts = [packed[start:end] for start, end in self.places]
        code = cast(Tensor, self.code) if self.nested else None
        weight = unpacked_4bit(parts, code, self.kind, self.shape, self.dtype)
        if self._then is None:
            return weight
        then = self._then
        with self.followed_by(None):  # `then` may read the weight itself, for its shape
            return then(weight)

    @contextlib.contextmanager
    def followed_by(self, then: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
        """A context in which the unpacked weight passes through `then`, such as an adapter, whenever it is read."""
        before, self._then = self._then, then
        try:
            yield
        finally:
            self._then = before

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Unpacking | None:
        """The Unpacking of the parameter `name` of `module`; None if that parameter is not packed."""
        if not parametrize.is_parametrized(module, name):
            return None
        unpacking = cast(Any, module.parametrizations)[name][0]
        return unpacking if isinstance(unpacking, cls) else None


def holds_experts(module: nn.Module, parameter: Tensor | None) -> bool:
    """Whether `parameter` of `module` holds the weights of all experts of a layer, [experts, rows, columns]."""
    return parameter is not None and parameter.dim() == 3 and "expert" in type(module).__name__.lower()


@contextlib.contextmanager
def experts_packed_as_read(job: Job) -> Iterator[None]:
    """A context in which weights of experts are packed as soon as they are set in a module, so that only one of them
    at a time is in memory unpacked. `unpack_where_read` makes them usable."""

    def pack(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or not holds_experts(module, parameter):
            return None
        return _packed(parameter, job)

    handle = register_module_parameter_registration_hook(cast(Callable[..., None], pack))
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def experts_shown(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A context in which packed weights of experts have their original shapes, without memory or values. peft needs
    the shapes to create adapters on them."""
    packed = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if hasattr(parameter, "of_shape")
    ]
    for module, name, parameter in packed:
        shown = torch.zeros((), dtype=dtype).expand(cast(Any, parameter).of_shape)
        module._parameters[name] = nn.Parameter(shown, requires_grad=False)
    try:
        yield
    finally:
        for module, name, parameter in packed:
            module._parameters[name] = parameter


def unpack_where_read(model: nn.Module, job: Job) -> int:
    """Let the experts of `model` unpack their weights whenever they read them. Returns the number of such weights.
    They were packed by `experts_packed_as_read`; weights on meta are replaced by bytes on meta."""
    from bitsandbytes.functional import create_dynamic_map

    code: Tensor | None = None
    count = 0
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not hasattr(parameter, "of_shape") and not (parameter.is_meta and holds_experts(module, parameter)):
                continue
            if code is None:
                code = cast(Any, create_dynamic_map)().to("cpu" if parameter.is_meta else parameter.device)
            packed: Any = parameter if hasattr(parameter, "of_shape") else _packed(parameter, job)
            setattr(module, name, packed)
            parametrize.register_parametrization(module, name, Unpacking(packed.of_shape, job, code), unsafe=True)
            # torch makes a new parameter from the given one: put the given one back
            bare = cast(Any, module.parametrizations)[name]
            bare.original = packed
            count += 1
    return count


def _packed(weight: nn.Parameter, job: Job) -> nn.Parameter:
    """The bytes of a weight, packed in 4 bits, as a parameter. Its attribute `holds` is the weight's number of
    elements, `of_shape` its shape."""
    nested = job.bnb_4bit_use_double_quant
    sizes = sizes_of_4bit(weight.numel(), nested=nested)
    parts: list[Tensor] | None = None
    if not weight.is_meta:
        from bitsandbytes.functional import quantize_4bit

        numbers, state = cast(Any, quantize_4bit)(
            weight.data, compress_statistics=nested, quant_type=job.bnb_4bit_quant_type
        )
        parts = parts_of_4bit(numbers, state)
    parameter: Any = nn.Parameter(packed_bytes(sizes, parts, weight.device), requires_grad=False)
    parameter.holds, parameter.of_shape = weight.numel(), tuple(weight.shape)
    parameter._is_hf_initialized = True  # otherwise transformers would initialize it again
    return cast(nn.Parameter, parameter)


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
