"""Counts the floating point operations and the memory traffic of operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from planner.graph.nodes import is_op, is_view
from planner.machine.work import Work


def work_of(nodes: Sequence[fx.Node]) -> tuple[Work, ...]:
    """The FLOPs and the bytes read and written (`Work`) of each operation among `nodes`, in order. Views and `getitem`
    are left out."""
    works = []
    for node in nodes:
        if is_op(node) and not is_view(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
            works.append(_work(node.target, args, kwargs, node.meta.get("val")))
    return tuple(works)


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that appends the work (FLOPs and bytes) of each operation run under it to the list `work`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[Work] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.work.append(_work(func, args, kwargs or {}, result))
        return result


def _work(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> Work:
    tensors = [t for t in tree_leaves((args, kwargs, value)) if torch.is_tensor(t)]
    moved = sum(t.numel() * t.element_size() for t in tensors)
    formula = flop_registry.get(func.overloadpacket)
    return Work(int(formula(*_one_head_a_query(func, args), **kwargs, out_val=value)) if formula else 0, moved)


def _one_head_a_query(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments for a FLOP formula. For fused attention, keys and values are given as many heads as queries, since
    the kernel computes that many. PyTorch's formulas before 2.13 raise AssertionError if heads are grouped."""
    if not func._schema.name.startswith("aten::_scaled_dot_product"):
        return args
    names = [argument.name for argument in func._schema.arguments]
    heads, arguments = args[names.index("query")].shape[1], list(args)
    for name in ("key", "value"):
        at = names.index(name)
        rows, _, length, width = arguments[at].shape
        arguments[at] = arguments[at][:, :1].expand(rows, heads, length, width)
    return arguments
