"""Checks in a trace that tensors which eager changes in place keep their layout.

A trace has no operation in place: each becomes one that makes a new tensor. If the changed tensor is a part of a larger
one, the new tensor may be contiguous where eager's is not. Kernels then take other paths (tanh of contiguous numbers
and of numbers with gaps differ in the last bit).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OtherLayoutError(Exception):
    """Says that the trace would go on with a tensor that is laid out otherwise than eager's."""


class SameLayouts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, in a trace, raises OtherLayoutError after an operation that leaves a tensor laid out otherwise than in
    eager."""

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
