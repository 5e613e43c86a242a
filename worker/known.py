"""Numbers on the device that the host knows: nobody waits for the device to look at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        "__add__", "__and__", "__eq__", "__ge__", "__getitem__", "__gt__", "__invert__", "__le__", "__lt__", "__ne__",
        "__or__", "__radd__", "__rsub__", "__sub__", "add", "all", "any", "bool", "cumsum", "diff", "eq", "expand",
        "ge", "gt", "le", "long", "lt", "max", "min", "ne", "reshape", "sub", "sum", "unsqueeze", "view",
    }
)  # fmt: skip

_MADE = frozenset({"arange", "ones"})  # of lengths

_Host = Callable[[], Tensor]
"""Makes the numbers on the host."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a known tensor was among the arguments; the tensor itself must not stay alive."""

    host: _Host


class Known(TorchFunctionMode):
    """Inside, a model's code that looks at whole numbers which came from the host, or are made of lengths, gets its
    answer from the host: whether a batch has padding, whether its positions are those of several texts in a row.

    What is done with such numbers on the device is written down, and done on the host too if somebody asks. All else is
    as it ever is, as is what the code computes with.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._type = device.type
        self._host: Any = WeakTensorKeyDictionary()  # tensor -> (its version, what makes its numbers on the host)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _ASKS and (host := self._of(args[0])) is not None:
            return function(host(), *args[1:], **kwargs)
        made = function(*args, **kwargs)
        if (
            torch.is_tensor(made)
            and made.device.type == self._type
            and (name == "ones" or not made.is_floating_point())  # ones are whole numbers in every dtype
        ):
            host = self._follow(name, function, args, kwargs, made)
            if host is not None and not made.is_inference():
                self._host[made] = made._version, host
        return made

    def _of(self, value: Any) -> _Host | None:
        """None when its numbers are not known, or were changed in place."""
        version, host = self._host.get(value, (None, None)) if torch.is_tensor(value) else (None, None)
        return host if host is not None and version == value._version else None

    def _follow(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Tensor
    ) -> _Host | None:
        if name in _MADE:
            asked = {**kwargs, "device": "cpu"}
            return None if any(map(torch.is_tensor, args)) else lambda: function(*args, **asked)
        if name == "to":
            source, dtype = args[0], made.dtype
            host = self._of(source) or ((lambda: source) if source.is_cpu else None)
            return None if host is None else lambda: host().to(dtype)
        tensors = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)] if name in _FOLLOWED else []
        hosts = {id(t): host for t in tensors if (host := self._of(t)) is not None}
        if not tensors or len(hosts) < len({id(t) for t in tensors}):
            return None
        shape = tree_map_only(Tensor, lambda t: _Place(hosts[id(t)]), (args, kwargs))

        def compute() -> Tensor:
            there, named = tree_map_only(_Place, lambda place: place.host(), shape)
            return function(*there, **named)  # type: ignore[no-any-return]

        return compute
