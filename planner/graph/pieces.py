"""The frame's graph between blocks, in pieces that can each run backward once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Call = TypeVar("Call")
Due = tuple[GradientEdge, Tensor]
"""Where a gradient goes on, and the gradient."""

Key = tuple[int, int]
"""A tensor of the graph: the id of the node that makes it, and which of the node's results it is."""


def key_of(edge: GradientEdge) -> Key:
    """The tensor whose gradient goes on there."""
    return id(edge.node), edge.output_nr


def place_of(node: Any) -> int:
    """Where a node is among those of its thread's graph: of those that can run, autograd runs the last one."""
    return cast(int, node._sequence_nr())


@dataclass(frozen=True, slots=True)
class End:
    """A tensor that a piece is made of and others too: a block has made it, or was given it before. `first`, `last`:
    the places of the piece's nodes that read it, so many `times`."""

    edge: GradientEdge
    first: float
    last: float
    times: int = 1

    def together(self, other: End) -> End:
        """Read by both."""
        places = min(self.first, other.first), max(self.last, other.last)
        return End(self.edge, *places, self.times + other.times)


@dataclass(slots=True, eq=False)
class _Piece:
    """Nodes that hang together. `first`: the number of the first call that was given a tensor of theirs; `after`: that
    of the last call that `ends` belong to, -1 if there is none; `waiting`: gradients that later calls have left.

    Where `after` is not before `first`, no time is right for all of it: each call runs what leads to its arguments.
    """

    first: int
    after: int
    nodes: list[Node] = field(default_factory=list)
    waiting: list[Due] = field(default_factory=list)
    ends: dict[Key, End] = field(default_factory=dict)

    def add(self, end: End) -> None:
        """Its nodes read that tensor."""
        known = self.ends.get(key_of(end.edge))
        self.ends[key_of(end.edge)] = end if known is None else known.together(end)


class Pieces(Generic[Call]):
    """What blocks were given in one slice's forward, and the pieces of the frame's graph that it came from.

    A model may make a tensor of which every layer is given a part (embeddings per layer), or give one tensor to several
    (what an encoder made). Its graph can run backward only once, when the gradients of all layers are there: that is
    when the first of them has run. Autograd then runs the nodes in the order in which it always does.

    given        where a tensor of the graph comes from -> the last call that was given it, and as which argument
    disordered   how many gradients have arrived in another order than autograd's
    """

    def __init__(self) -> None:
        self.given: dict[Key, tuple[Call, int]] = {}
        self.disordered = 0
        self._count = 0
        self._owners: dict[int, tuple[int, Call]] = {}  # id of a node that is a call's -> the call's number, the call
        self._places: dict[int, int] = {}  # number of a call -> its node's
        self._pieces: dict[int, _Piece] = {}  # by the ids of their nodes, which they keep alive
        self._arrived: dict[Key, End] = {}  # whose gradients have arrived at a call's node

    def enter(self, edges: Sequence[GradientEdge | None]) -> int:
        """A call is given tensors with these edges. Returns its number."""
        number, self._count = self._count, self._count + 1
        for edge in edges:
            if edge is not None:
                self._visit(edge, number)
        return number

    def made(self, number: int, node: Node, call: Call, *, itself: bool = True) -> None:
        """`node` is that call in the graph, or (not `itself`) a tensor that it was given: pieces end there."""
        self._owners[id(node)] = number, call
        if itself:
            self._places[number] = place_of(node)

    def owner(self, edge: GradientEdge) -> Call | None:
        """The call that gets what goes on there, if it is not the frame."""
        return self._owners[id(edge.node)][1] if id(edge.node) in self._owners else None

    def _visit(self, start: GradientEdge, number: int) -> None:
        piece = _Piece(number, -1)
        todo, met = [(start, 0)], dict[int, _Piece]()
        while todo:
            edge, reader = todo.pop()
            node = edge.node
            if id(node) in self._owners:
                if edge is not start:
                    piece.add(End(edge, reader, reader))
                piece.after = max(piece.after, self._owners[id(node)][0])
            elif id(node) in self._pieces:
                met[id(self._pieces[id(node)])] = self._pieces[id(node)]
            elif node.next_functions:  # else a leaf, which adds up whatever comes
                self._pieces[id(node)] = piece
                piece.nodes.append(node)
                todo += [(GradientEdge(n, k), place_of(node)) for n, k in node.next_functions if n is not None]
        met.pop(id(piece), None)
        for other in met.values():
            piece.first = min(piece.first, other.first)
            piece.after = max(piece.after, other.after)
            piece.nodes += other.nodes
            piece.waiting += other.waiting
            for end in other.ends.values():
                piece.add(end)
            self._pieces.update(dict.fromkeys(map(id, other.nodes), piece))

    def due(self, number: int, gradients: Sequence[Due]) -> tuple[list[Due], list[End]]:
        """What is to run backward now that call `number` has left its `gradients`: of the pieces that it is the first
        one of, all that was left, and where it ends. The others are kept."""
        now: list[Due] = []
        ends: dict[Key, End] = {}
        place = self._places.get(number, math.inf)
        for edge, gradient in gradients:
            piece = self._pieces.get(id(edge.node))
            waits = piece is not None and piece.after < piece.first and piece.first != number
            (piece.waiting if piece and waits else now).append((edge, gradient))
            if id(edge.node) in self._owners:
                ends[key_of(edge)] = End(edge, place, place)
        for piece in {id(p): p for p in self._pieces.values() if p.first == number}.values():
            now += piece.waiting
            ends |= piece.ends
            for node in piece.nodes:
                del self._pieces[id(node)]
        self._note(ends.values())
        return now, list(ends.values())

    def _note(self, ends: Iterable[End]) -> None:
        for end in ends:
            before = self._arrived.get(key_of(end.edge))
            if before is not None:
                # Of two numbers the order does not matter.
                self.disordered += end.last > before.first and before.times + end.times > 2
                end = before.together(end)
            self._arrived[key_of(end.edge)] = end

    def begins(self, number: int, edge: GradientEdge) -> bool:
        """Whether what has arrived at a block for that result, which call `number` was given, would come before what
        the call makes. Then the call takes it."""
        arrived = self._arrived.get(key_of(edge))
        if arrived is not None and arrived.first < self._places.get(number, math.inf):
            return False
        self._arrived.pop(key_of(edge), None)
        return True
