"""Lets the host answer a model's questions about numbers on the device that the host knows, too, so that it does not
wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

_ASKS = frozenset({"__bool__", "__contains__", "__int__", "item"})
_FOLLOWED = frozenset(
    {
        "__add__",
        "__and__",
        "__eq__",
        "__ge__",
        "__getitem__",
        "__gt__",
        "__invert__",
        "__le__",
        "__lt__",
        "__ne__",
        "__or__",
        "__radd__",
        "__rsub__",
        "__sub__",
        "add",
        "all",
        "any",
        "bool",
        "cumsum",
        "diff",
        "eq",
        "expand",
        "ge",
        "gt",
        "le",
        "long",
        "lt",
        "max",
        "min",
        "ne",
        "reshape",
        "sub",
        "sum",
        "unsqueeze",
        "view",
    }
)

_MADE = frozenset({"arange", "ones"})  # made from lengths


@dataclass(frozen=True, slots=True)
class _Origin:
    """How the host makes a known tensor's numbers. `sources`: the host tensors that it reads for that, by their id,
    each with the version it had."""

    host: Callable[[], Any]
    sources: Mapping[int, tuple[Tensor, int]]


def _of_host(source: Tensor, dtype: torch.dtype) -> _Origin:
    """The origin of a device copy of the host tensor `source`."""
    return _Origin(lambda: source.to(dtype), {id(source): (source, source._version)})


@dataclass(frozen=True, slots=True)
class _Place:
    """A placeholder for a known tensor among an operation's arguments, since the tensor itself must not stay alive."""

    origin: _Origin


class HostValues(TorchFunctionMode):
    """A context in which the host answers a model's questions about integer tensors that came from the host or are made
    from lengths: whether a batch has padding, whether its positions are those of several texts in a row. So the host
    need not wait for the device.

    Operations on such tensors are noted, and done on the host as well when the code asks for a result. The device
    computes as always.

    A tensor that was changed in place since, on the device or on the host, is not answered for. Its version number
    shows the change. A write that leaves the version alone, through `tensor.data` or a NumPy array over its memory, is
    not noticed."""

    def __init__(self, device: torch.device, known: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        """`known`: tensors on the device, each with the host tensor that it is a copy of."""
        super().__init__()
        self._type = device.type
        self._origins: Any = WeakTensorKeyDictionary()  # tensor -> (its version, its origin)
        for on_device, on_host in known:
            self._origins[on_device] = on_device._version, _of_host(on_host, on_host.dtype)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _ASKS and (answer := self._made_of(function, args, kwargs)) is not None:
            return answer.host()
        result = function(*args, **kwargs)
        if (
            torch.is_tensor(result)
            and result.device.type == self._type
            and (name == "ones" or not result.is_floating_point())  # ones are whole numbers in every dtype
        ):
            origin = self._follow(name, function, args, kwargs, result)
            if origin is not None and not result.is_inference():
                self._origins[result] = result._version, origin
        return result

    def _of(self, tensor: Tensor) -> _Origin | None:
        """The tensor's origin; None when its numbers are not known, or were changed in place."""
        version, origin = self._origins.get(tensor, (None, None))
        if origin is None or version != tensor._version:
            return None
        return origin if all(source._version == was for source, was in origin.sources.values()) else None

    def _follow(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
    ) -> _Origin | None:
        if name in _MADE:
            on_cpu = {**kwargs, "device": "cpu"}
            with_tensors = any(map(torch.is_tensor, tree_leaves((args, kwargs))))
            return None if with_tensors else _Origin(lambda: function(*args, **on_cpu), {})
        if name == "to":
            source, dtype = args[0], result.dtype
            if (known := self._of(source)) is not None:
                return _Origin(lambda: known.host().to(dtype), known.sources)
            if source.is_cpu and not source.is_inference():
                return _of_host(source, dtype)
        return self._made_of(function, args, kwargs) if name in _FOLLOWED else None

    def _made_of(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Origin | None:
        """The origin of what `function` makes; None when it is given no tensor, or one whose numbers are not known."""
        tensors = {id(t): t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        origins = {key: origin for key, t in tensors.items() if (origin := self._of(t)) is not None}
        if not tensors or len(origins) < len(tensors):
            return None
        shape = tree_map_only(Tensor, lambda t: _Place(origins[id(t)]), (args, kwargs))

        def compute() -> Any:
            values, named = tree_map_only(_Place, lambda place: place.origin.host(), shape)
            return function(*values, **named)

        return _Origin(compute, {key: source for origin in origins.values() for key, source in origin.sources.items()})
