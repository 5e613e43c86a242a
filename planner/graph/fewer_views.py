"""Finds views that generated code need not compute. Issuing an operation takes time, even if it computes nothing.

A trace of a linear layer's backward transposes a weight twice, and its gradient twice; views follow views. Where only
other views read a view, its name is bound to the tensor under it instead. So each name refers to the same memory as in
the trace, over the same lines: results and peak bytes stay those of the traced list.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from planner.graph.nodes import is_op, parent

_aten = torch.ops.aten
_TURNED = frozenset({_aten.t.default})
_SHAPED = frozenset({_aten.view.default, _aten._unsafe_view.default})


def not_called(nodes: Sequence[fx.Node], results: Collection[fx.Node], sinks: Collection[fx.Node]) -> set[fx.Node]:
    """The views among `nodes` that need no call, because their name can stand for the tensor under them. Views in
    `results` are always made: who gets one may ask whether it is a view. `sinks`: nodes whose values are handed out
    while the code runs."""
    among, skipped = set(nodes), set[fx.Node]()
    has: dict[fx.Node, fx.Node] = {}  # node -> the node whose value has its name, where that is not its own value
    for node in nodes:
        if node in results or not is_op(node) or node.target not in _TURNED | _SHAPED:
            continue
        base = parent(node)
        view, value = node.meta["val"], has.get(base, base).meta["val"]
        if node.target in _TURNED:
            kind, itself, can = _TURNED, base in has, True
        else:
            kind = _SHAPED
            itself = view.shape == value.shape and view.stride() == value.stride()
            can = value.is_contiguous()  # then each view of the view is also a view of the value
        readers = [user for user in node.users if user in among]
        if itself:
            skipped.add(node)
        elif can and readers and node not in sinks and all(u.target in kind and u not in results for u in readers):
            skipped.add(node)
            has[node] = has.get(base, base)
    return skipped
