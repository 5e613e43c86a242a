"""Views that generated code can do without: each operation costs time to issue, also one that computes nothing.

A trace of a linear layer's backward transposes a weight twice, and its gradient twice; views follow views. What is left
out makes no tensor and fills no memory, so numbers and bytes are those of the whole list.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner.graph.nodes import is_view

_aten = torch.ops.aten
_SHAPED = frozenset({_aten.view.default, _aten._unsafe_view.default})
_TURNED = frozenset({_aten.t.default, _aten.transpose.int})


@dataclass(frozen=True, slots=True)
class Line:
    """An operation as it is called. Where `target` is None nothing is: the node's value is that of the one argument."""

    node: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def reads(self) -> list[fx.Node]:
        """Nodes whose values it needs, each once."""
        found: dict[fx.Node, None] = {}
        fx.map_arg((self.args, dict(self.kwargs)), found.setdefault)
        return list(found)


def lines_of(
    nodes: Sequence[fx.Node], *, results: Collection[fx.Node], sinks: Collection[fx.Node]
) -> list[Line | None]:
    """A line for each of `nodes`, None where nothing needs one. `results` are made as they were traced: whoever gets
    one may ask whether it is a view. `sinks` are handed out on the way."""
    made: dict[fx.Node, Line] = {}

    def value_of(node: fx.Node) -> fx.Node:
        line = made.get(node)
        return line.args[0] if line is not None and line.target is None else node

    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        line = Line(node, node.target, args, kwargs)
        made[node] = _shorter(line, made) if is_view(node) and node not in results else line
    return _needed(list(made.values()), results, sinks)


def _shorter(line: Line, made: Mapping[fx.Node, Line]) -> Line:
    """The tensor itself that a view of views is, or a view of the tensor that its tensor is a view of. Inputs are what
    they are: only what is `made` on the way is known."""
    node, base = line.node, line.args[0]
    before = made.get(base)
    if node.target in _TURNED and before is not None and before.target in _TURNED:
        if _turned(node) == _turned(base):
            return Line(node, None, before.args[:1], {})
    elif node.target in _SHAPED:
        shape, strides = list(node.meta["val"].shape), node.meta["val"].stride()
        while True:
            value = base.meta["val"]
            if list(value.shape) == shape and value.stride() == strides:
                return Line(node, None, (base,), {})
            before = made.get(base)
            if before is None or before.target not in _SHAPED or not _can(before.args[0], shape, strides):
                return line
            base = before.args[0]
            line = Line(node, _aten.view.default, (base, shape), {})
    return line


def _can(base: fx.Node, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a view of the tensor in that shape has those strides."""
    try:
        return tuple(base.meta["val"].view(shape).stride()) == tuple(strides)
    except RuntimeError:  # its memory is not in that order
        return False


def _turned(node: fx.Node) -> frozenset[int]:
    """The dimensions that change places."""
    dimensions = node.meta["val"].dim()
    if node.target is _aten.t.default:
        return frozenset(range(dimensions))
    return frozenset(int(d) % dimensions for d in node.args[1:])  # type: ignore[arg-type]


def _needed(lines: Sequence[Line], results: Collection[fx.Node], sinks: Collection[fx.Node]) -> list[Line | None]:
    """None for a view that nobody reads any more, and for what is another node's value."""
    read = set(results) | set(sinks)
    found: list[Line | None] = []
    for line in reversed(lines):
        wanted = line.node in read if line.target is not None else line.node in sinks
        if wanted or not is_view(line.node):
            read.update(line.reads)
            found.append(line)
        else:
            found.append(None)
    return found[::-1]
