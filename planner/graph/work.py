"""How much arithmetic and memory traffic a list of traced operations is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from planner.graph.nodes import is_op, is_view


@dataclass(frozen=True, slots=True)
class Work:
    """One operation: floating point operations, bytes read and written."""

    flops: int
    bytes: int


def work_of(nodes: Sequence[fx.Node]) -> tuple[Work, ...]:
    """The work of each operation that does any (views and `getitem` do none)."""
    return tuple(_work(node) for node in nodes if is_op(node) and not is_view(node))


def _work(node: fx.Node) -> Work:
    value = node.meta.get("val")
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    tensors = [t for t in tree_leaves((args, kwargs, value)) if torch.is_tensor(t)]
    moved = sum(t.numel() * t.element_size() for t in tensors)
    target: Any = node.target
    formula = flop_registry.get(target.overloadpacket)
    return Work(int(formula(*args, **kwargs, out_val=value)) if formula else 0, moved)
