"""Logits that are not computed where the model asks for them, but when their loss is.

`DeferredLogits` stands for the logits in the model's own code. It remembers the operations that the model applies to
each logit on the way to cross entropy. Subclasses say how cross entropy is computed then, and what happens if the model
uses its logits in another way.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor

Elementwise = Callable[[Tensor], Tensor]

_ELEMENTWISE = frozenset(
    {"float", "to", "type", "contiguous", "clone", "tanh", "mul", "__mul__", "__rmul__", "div", "__truediv__"}
)
_FACTS = frozenset({"__get__", "size", "dim", "ndimension", "__len__", "is_floating_point", "numel", "stride"})
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real"})  # attributes that are no facts about the logits


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The arguments of a call of cross entropy apart from the logits; the names are PyTorch's. `target` [rows]: the
    class of each row."""

    target: Tensor
    weight: Tensor | None = None
    size_average: bool | None = None
    ignore_index: int = -100
    reduce: bool | None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether each row's loss is minus the log of its target's probability, and nothing else."""
        special = self.weight, self.size_average, self.reduce
        return not (
            any(value is not None for value in special) or self.label_smoothing or self.target.is_floating_point()
        )


class DeferredLogits(torch.Tensor):
    """Logits [..., vocabulary] without data. `source` [..., n] is the tensor that they follow from row by row, `post`
    the elementwise operations applied to them so far."""

    source: Tensor
    post: tuple[Elementwise, ...]

    @classmethod
    def _make(cls, source: Tensor, vocabulary: int, dtype: torch.dtype, post: Sequence[Elementwise] = ()) -> Self:
        """Logits without data that follow from `source`. `dtype`: their dtype after the operations `post`."""
        make = cast(Any, torch.Tensor)._make_wrapper_subclass
        logits = make(cls, (*source.shape[:-1], vocabulary), dtype=dtype, device=source.device)
        logits.source, logits.post = source, tuple(post)
        return cast(Self, logits)

    @abstractmethod
    def after(self, step: Elementwise, source: Tensor, dtype: torch.dtype, post: Sequence[Elementwise]) -> Tensor:
        """These logits after the operation `step`, which changes no number's place in its row: they follow from
        `source` and have dtype `dtype` after the operations `post`. Deferred too, where that is possible."""

    @abstractmethod
    def cross_entropy(self, loss: CrossEntropy) -> Tensor:
        """The cross entropy of these logits [rows, vocabulary]."""

    @classmethod
    @abstractmethod
    def other_use(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `function` gives, which is no operation that can wait for the loss."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", str(function))
        me = args[0] if args else kwargs.get("input")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _FACTS and (name != "__get__" or attribute(function) not in _VALUES):
                return function(*args, **kwargs)
            if not isinstance(me, cls):
                return cls.other_use(function, args, kwargs)
            others, width = args[1:], me.source.shape[-1]
            step = functools.partial(_apply, function, tuple(others), kwargs)
            if name in _ELEMENTWISE and not any(torch.is_tensor(value) for value in (*others, *kwargs.values())):
                none = me.source.new_empty(0, dtype=me.dtype)
                if (like := step(none)) is none and me.source.is_contiguous():
                    return me
                if torch.is_tensor(like) and like.device == me.device:
                    return me.after(step, me.source, like.dtype, (*me.post, step))
            if name in ("view", "reshape"):
                shape = others[0] if len(others) == 1 and isinstance(others[0], (tuple, list, torch.Size)) else others
                if shape and shape[-1] == me.shape[-1]:
                    return me.after(step, me.source.reshape(*shape[:-1], width), me.dtype, me.post)
            if name == "flatten" and me.dim() == 3 and tuple(others) == (0, 1):
                return me.after(step, me.source.flatten(0, 1), me.dtype, me.post)
            if name == "cross_entropy" and me.dim() == 2:
                kwargs.pop("input", None)
                return me.cross_entropy(CrossEntropy(*others, **kwargs))
            return cls.other_use(function, args, kwargs)


def attribute(getter: Any) -> str:
    """The name of the attribute that `getter` reads, "" if it is no attribute's getter."""
    return str(getattr(getattr(getter, "__self__", None), "__name__", ""))


def _apply(function: Any, others: Sequence[Any], kwargs: Mapping[str, Any], value: Tensor) -> Tensor:
    return cast(Tensor, function(value, *others, **kwargs))
