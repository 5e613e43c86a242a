"""Tensors that eager changes in place, and a trace makes anew: what is read of them later must be laid out alike.

A trace has no operation in place: each becomes one that makes another tensor. Where what is changed is a part of a
larger tensor, the other one may lie in one piece, and then kernels take other paths (tanh of numbers in a row, and of
numbers apart, differ in the last bit).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OtherLayoutError(Exception):
    """The trace would go on from a tensor that is laid out otherwise than eager's."""


class SameLayouts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, in a trace: raises OtherLayoutError behind the operation that makes a difference."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, FunctionalTensor) and not _as_said(tensor):
                raise OtherLayoutError(f"what {func} changes in place is not laid out as in the trace")
        return result


def _as_said(tensor: FunctionalTensor) -> bool:
    torch._sync(tensor)  # type: ignore[no-untyped-call, attr-defined]
    made = torch._from_functional_tensor(tensor.elem)
    return all(
        size <= 1 or said == found
        for size, said, found in zip(tensor.shape, tensor.stride(), made.stride(), strict=True)
    )
