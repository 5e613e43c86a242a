"""Recognizes the additions of gradients that autograd does in place, but not while a dispatch mode is on.

If a tensor is used twice, autograd adds the second gradient to the first, in the first one's memory if nothing else
holds it (`InputBuffer::accumulate` in PyTorch). While a dispatch mode is on, or for a subclass of tensors, it always
makes a new tensor. So a mode that counts memory must do the addition in place itself. Otherwise it counts a tensor
that training never has.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ADD = torch.ops.aten.add.Tensor


def adds_in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether an operation that is being dispatched is an addition of gradients that autograd does in place when no
    mode is on: in a backward, of two tensors of one shape and dtype, the first of which only autograd holds. Call this
    function directly in `__torch_dispatch__`, because it counts that function's own references to the tensor."""
    if func is not _ADD or kwargs or torch._C._current_graph_task_id() < 0 or torch.is_grad_enabled():
        return False
    first, second = args
    return (
        isinstance(first, Tensor)
        and isinstance(second, Tensor)
        and first.layout is second.layout is torch.strided
        and (first.dtype, first.shape) == (second.dtype, second.shape)
        and torch.ops.aten.is_non_overlapping_and_dense.default(first)
        and _holders(first) == _of_a_sum()
    )


def _holders(tensor: Any) -> tuple[int, int, int]:
    """The numbers of references to the tensor in C++, to the tensor in Python, and to its storage."""
    of_memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), sys.getrefcount(tensor), of_memory


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.holders: tuple[int, int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD:
            first, _ = args
            self.holders = _holders(first)
        return func(*args, **(kwargs or {}))


@functools.cache
def _of_a_sum() -> tuple[int, int, int] | None:
    """The numbers of references to the first gradient in an addition that autograd does in place. There is more than
    one; how many depends on the version of PyTorch and the calls in Python. They are found by making such an addition,
    in a thread where nothing is being dispatched, and only when they are needed: the first backward of a process
    initializes CUDA."""
    holders: list[tuple[int, int, int] | None] = []

    def make() -> None:
        x = torch.ones(1, requires_grad=True)
        y = x * 1.0
        z = y.exp() + y.sin()  # outside: only the sum of gradients is counted
        with _Counter() as counter:
            torch.autograd.grad(z, x)
        holders.append(counter.holders)

    thread = threading.Thread(target=make, name="offmate-sum")
    thread.start()
    thread.join()
    return holders[0] if holders else None
