"""The frame's graph between blocks, in pieces that can each run backward once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Call = TypeVar("Call")
Due = tuple[GradientEdge, Tensor]
"""Where a gradient goes on, and the gradient."""


@dataclass(slots=True, eq=False)
class _Piece(Generic[Call]):
    """Nodes that hang together. `first`: the number of the first call that was given a tensor of theirs; `after`: that
    of the last call whose results they are made of, -1 if of none; `waiting`: gradients that later calls have left.

    Where `after` is not before `first`, no time is right for all of it: each call runs what leads to its arguments.
    """

    first: int
    after: int
    nodes: list[Node] = field(default_factory=list)
    waiting: list[Due] = field(default_factory=list)


class Pieces(Generic[Call]):
    """What blocks were given in one slice's forward, and the pieces of the frame's graph that it came from.

    A model may make a tensor of which every layer is given a part (embeddings per layer), or give one tensor to several
    (what an encoder made). Its graph can run backward only once, when the gradients of all layers are there: that is
    when the first of them has run. Autograd then runs the nodes in the order in which it always does.

    given    where a tensor of the graph comes from -> the last call that was given it, and as which argument
    """

    def __init__(self) -> None:
        self.given: dict[tuple[int, int], tuple[Call, int]] = {}
        self._calls: dict[int, int] = {}  # id of the node that a call is -> its number
        self._pieces: dict[int, _Piece[Call]] = {}  # by the ids of their nodes, which they keep alive
        self._count = 0

    def enter(self, edges: Sequence[GradientEdge | None]) -> int:
        """A call is given tensors with these edges. Returns its number."""
        number, self._count = self._count, self._count + 1
        for edge in edges:
            if edge is not None:
                self._visit(edge.node, number)
        return number

    def made(self, number: int, node: Node) -> None:
        """`node` is that call in the graph: pieces end there."""
        self._calls[id(node)] = number

    def _visit(self, start: Node, number: int) -> None:
        piece: _Piece[Call] = _Piece(number, -1)
        stack, met = [start], {}
        while stack:
            node = stack.pop()
            if id(node) in self._calls:
                piece.after = max(piece.after, self._calls[id(node)])
            elif id(node) in self._pieces:
                met[id(self._pieces[id(node)])] = self._pieces[id(node)]
            elif node.next_functions:  # else a leaf, which adds up whatever comes
                self._pieces[id(node)] = piece
                piece.nodes.append(node)
                stack += [before for before, _ in node.next_functions if before is not None]
        met.pop(id(piece), None)
        for other in met.values():
            piece.first = min(piece.first, other.first)
            piece.after = max(piece.after, other.after)
            piece.nodes += other.nodes
            piece.waiting += other.waiting
            self._pieces.update(dict.fromkeys(map(id, other.nodes), piece))

    def due(self, number: int, gradients: Sequence[Due]) -> list[Due]:
        """What is to run backward now that call `number` has left its `gradients`: of the pieces that it is the first
        one of, all that was left. The others are kept."""
        now: list[Due] = []
        for edge, gradient in gradients:
            piece = self._pieces.get(id(edge.node))
            waits = piece is not None and piece.after < piece.first and piece.first != number
            (piece.waiting if piece and waits else now).append((edge, gradient))
        for piece in {id(p): p for p in self._pieces.values() if p.first == number}.values():
            now += piece.waiting
            for node in piece.nodes:
                del self._pieces[id(node)]
        return now
