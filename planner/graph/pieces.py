"""Divides the autograd graph of the frame (the model's own code outside the blocks) into pieces, each of which can run
backward once, when all its gradients are there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Call = TypeVar("Call")
Due = tuple[GradientEdge, Tensor]
"""An edge of the autograd graph, and the gradient that enters the graph there."""

Key = tuple[int, int]
"""Identifies a tensor of the autograd graph: the id of the node that makes the tensor, and its index among the node's
results."""


def key_of(edge: GradientEdge) -> Key:
    """The key of the tensor whose gradient enters the autograd graph at `edge`."""
    return id(edge.node), edge.output_nr


def place_of(node: Any) -> int:
    """The autograd node's sequence number: its place in the order in which its thread made nodes. Of the nodes that
    are ready, autograd always runs the one made last."""
    return cast(int, node._sequence_nr())


@dataclass(frozen=True, slots=True)
class End:
    """A tensor at which a piece of the frame's autograd graph ends. Nodes of the piece read it, but a block has made
    it or got it as an argument, so that others may read it too. `first`, `last`: the places (`place_of`) of the first
    and the last node of the piece that reads it; `times`: how often the piece reads it."""

    edge: GradientEdge
    first: float
    last: float
    times: int = 1

    def together(self, other: End) -> End:
        """This end with the reads of `other`, an end at the same tensor, counted in."""
        places = min(self.first, other.first), max(self.last, other.last)
        return End(self.edge, *places, self.times + other.times)


@dataclass(slots=True, eq=False)
class _Piece:
    """Connected nodes of the frame's autograd graph. `first`: the number of the first block's call that got one of
    their tensors. `after`: the number of the last call that owns one of the `ends`, -1 if there is none. `waiting`:
    gradients that later calls have left here.

    If `after` is not less than `first`, no single time is right for the whole piece: then each call runs the part that
    leads to its own arguments.
    """

    first: int
    after: int
    nodes: list[Node] = field(default_factory=list)
    waiting: list[Due] = field(default_factory=list)
    ends: dict[Key, End] = field(default_factory=dict)

    def add(self, end: End) -> None:
        """Note that nodes of the piece read the tensor at `end`."""
        known = self.ends.get(key_of(end.edge))
        self.ends[key_of(end.edge)] = end if known is None else known.together(end)


class Pieces(Generic[Call]):
    """Decides when each piece of the frame's autograd graph runs backward, in one micro-batch. The frame is the
    model's own code outside the blocks; a piece is a connected part of it that made tensors which blocks got as
    arguments.

    A model may make a tensor of which every layer gets a part (embeddings per layer), or pass one tensor to several
    layers (the output of an encoder). The graph behind that tensor can run backward only once, when the gradients of
    all these layers are there: after the backward of the layer that is first in the forward. Autograd then runs the
    nodes in its usual order.

    given        tensor of the graph -> the last call that got it, and the argument's index there
    disordered   how many gradients have arrived in another order than autograd's
    """

    def __init__(self) -> None:
        self.given: dict[Key, tuple[Call, int]] = {}
        self.disordered = 0
        self._count = 0
        self._owners: dict[int, tuple[int, Call]] = {}  # id of a call's node -> the call's number, the call
        self._places: dict[int, int] = {}  # number of a call -> the place of its node
        self._pieces: dict[int, _Piece] = {}  # id of a node -> its piece, which keeps the node alive
        self._arrived: dict[Key, End] = {}  # tensor of a call -> the readers whose gradients have arrived there

    def enter(self, edges: Sequence[GradientEdge | None]) -> int:
        """Note that a block is called with tensors that have these edges. Returns the call's number, in the order of
        the forward."""
        number, self._count = self._count, self._count + 1
        for edge in edges:
            if edge is not None:
                self._visit(edge, number)
        return number

    def made(self, number: int, node: Node, call: Call, *, itself: bool = True) -> None:
        """Note that `node` of the autograd graph belongs to the call: pieces end there. `itself`: the node is the
        block's; otherwise it stands for a tensor that the block got as an argument."""
        self._owners[id(node)] = number, call
        if itself:
            self._places[number] = place_of(node)

    def owner(self, edge: GradientEdge) -> Call | None:
        """The block's call that gets a gradient entering at `edge`; None if `edge` belongs to the frame."""
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
            elif node.next_functions:  # else a leaf: it adds up its gradients in any case
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
        """What to run backward now that call `number` has computed `gradients` of its arguments: the gradients to
        start from, and the ends of this run. Pieces whose first call is this one run now, from all gradients that were
        left in them. Gradients that enter other pieces wait there for their first call."""
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
                # The order of two numbers does not matter for their sum: only three or more gradients count.
                self.disordered += end.last > before.first and before.times + end.times > 2
                end = before.together(end)
            self._arrived[key_of(end.edge)] = end

    def begins(self, number: int, edge: GradientEdge) -> bool:
        """Whether the gradient that has already arrived at a tensor precedes, in autograd's order, the part that call
        `number` will compute. `edge`: the tensor, which the call got as an argument. If so, the call must take that
        gradient, and it is forgotten here."""
        arrived = self._arrived.get(key_of(edge))
        if arrived is not None and arrived.first < self._places.get(number, math.inf):
            return False
        self._arrived.pop(key_of(edge), None)
        return True
