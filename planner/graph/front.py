"""Finds which values of a block are worth saving for backward: the sets that are best at some price of a saved byte.

A block's forward computes values that its backward reads. Each value is either saved, or computed again from other
saved values and from the block's input. At a given price in seconds per byte, the best choice is a minimum cut: an
operation that runs again costs its time, a saved value costs its bytes, and no operation runs without its inputs. The
prices at which the cut changes give all points of the lower convex hull of (bytes saved, extra seconds). Rockmate's
rk-checkmate (thesis, chapter 2) chooses among the same sets, by an integer program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from planner.graph.joint import Joint
from planner.graph.min_cut import Network
from planner.graph.nodes import StorageId, Storages, is_mutable
from planner.graph.recipes import RECIPES, Recipe, recipes_saving
from planner.graph.saved import cut, forward_nodes, savable
from planner.graph.work import work_of

_FLOPS_PER_BYTE = 100
"""Floating point operations that a card does while it moves a byte. The number only decides which sets are proposed:
the code made for them is measured as a whole."""
_MOST = 4  # sets on the front
_NOTHING = 1e-9  # relative: a smaller gain is a rounding error


@dataclass(frozen=True, slots=True)
class Saved:
    """A set of nodes whose values forward saves for backward. `bytes`: what stays on the device for the set, with the
    block's input if backward reads it. `again`: the time of the operations that run again, expressed as bytes of
    memory traffic."""

    nodes: frozenset[fx.Node]
    bytes: int
    again: float


def front(joint: Joint) -> list[Saved]:
    """At most four sets of values to save, ordered from the fewest bytes to the fewest seconds, without the empty set.
    The list is empty for a block with operations in place."""
    return _front_of(Cutter(joint))


def _front_of(cutter: Cutter) -> list[Saved]:
    if not cutter.operations or any(is_mutable(node) for node in cutter.forward):
        return []
    return [point for point in _thinned(hull(cutter)) if point.nodes]


def recipes_on_front(joint: Joint) -> Iterator[Recipe]:
    """The recipes that save the sets that `front` finds, without those that equal a recipe of RECIPES."""
    cutter = Cutter(joint)
    named = {
        cutter.saved({node for node in cutter.savable if recipe.may_save(node)}).nodes: recipe.saves
        for recipe in RECIPES.values()
    }
    for number, saved in enumerate(_front_of(cutter), 1):
        yield from recipes_saving(number, named.get(saved.nodes, " ".join(sorted(node.name for node in saved.nodes))))


class Cutter:
    """Finds the best set of values to save in one block, for a price of a byte, by a minimum cut.

    The network has a node for each operation and each value of forward, and one for the block's input. On the sink's
    side are the operations that run again, and the values that backward has: saved or computed again. A cut pays for
    each operation on that side (arc from the source). For each value on that side whose operation is not, it pays the
    value's bytes (arc from the operation): this value is saved. Arcs of infinite capacity from values to their readers
    bring the inputs of an operation that runs again to the sink's side, too.
    """

    def __init__(self, joint: Joint) -> None:
        self.storages = Storages(joint.module.graph)
        ahead = forward_nodes(joint)
        self.forward = set(ahead)
        self.grads = [node for node in joint.grads.values() if node is not None]
        operations: dict[fx.Node, list[StorageId]] = {}
        for storage in self.storages.bytes:
            if storage[0] in self.forward:
                operations.setdefault(storage[0], []).append(storage)
        self.operations = operations
        self.takes = {node: _taken(node) for node in operations}
        self.savers: dict[StorageId, fx.Node] = {}
        self.savable = savable(ahead)
        for node in (node for node in ahead if node in self.savable):
            for storage in self.storages.of[node]:
                self.savers.setdefault(storage, node)
        trained = (node for i, node in enumerate(joint.inputs) if node is not None and joint.grads.get(i) is not None)
        self.input = next((self.storages.of[node][0] for node in trained), None)
        self.wanted = self._read_by_backward()

    def _read_by_backward(self) -> set[StorageId]:
        """The storages of forward's values and of placeholders (the input among them) that backward's own operations
        read."""
        storages, seen, todo = set[StorageId](), set[fx.Node](), list(self.grads)
        while todo:
            node = todo.pop()
            if node in self.forward or node.op == "placeholder":
                storages.update(self.storages.of[node])
            elif node not in seen:
                seen.add(node)
                todo += node.all_input_nodes
        return storages

    def at(self, price: float) -> Saved:
        """The set of values that is best to save if a byte costs `price`. The price is in bytes of memory traffic, the
        unit in which `Saved.again` expresses time."""
        operations = {node: 2 + k for k, node in enumerate(self.operations)}
        known = [s for its in self.operations.values() for s in its] + ([self.input] if self.input is not None else [])
        values = {storage: 2 + len(operations) + k for k, storage in enumerate(known)}
        network = Network(2 + len(operations) + len(values))
        for node, number in operations.items():
            network.arc(0, number, self.takes[node])
            for storage in {s for a in node.all_input_nodes for s in self.storages.of[a]} & values.keys():
                network.arc(values[storage], number, float("inf"))
            for storage in self.operations[node]:
                cost = price * self.storages.bytes[storage] if storage in self.savers else float("inf")
                network.arc(number, values[storage], cost)
        if self.input is not None:
            network.arc(0, values[self.input], price * self.storages.bytes[self.input])
        for storage in self.wanted & values.keys():
            network.arc(values[storage], 1, float("inf"))
        absent = network.cut(0, 1)
        return self.saved(
            {
                self.savers[storage]
                for node, number in operations.items()
                if number in absent
                for storage in self.operations[node]
                if values[storage] not in absent
            }
        )

    def saved(self, chosen: set[fx.Node]) -> Saved:
        """The set that is really saved if the values of `chosen` may be saved: backward may need only some of them."""
        saved, needed = cut(self.grads, chosen)
        ids = {s for node in saved for s in self.storages.of[node]}
        if self.input is not None and any(self.input in self.storages.of[a] for n in needed for a in n.all_input_nodes):
            ids.add(self.input)
        return Saved(
            frozenset(saved),
            sum(self.storages.bytes[s] for s in ids),
            sum(self.takes.get(node, 0) for node in needed),
        )


def _taken(node: fx.Node) -> float:
    """The time of an operation, expressed as bytes of memory traffic."""
    return max([1.0, *(max(work.bytes, work.flops / _FLOPS_PER_BYTE) for work in work_of([node]))])


def hull(cutter: Cutter) -> list[Saved]:
    """All sets that are best at some price of a byte, from the fewest bytes to the fewest seconds."""
    most = sum(cutter.takes.values())
    few, many = cutter.at(1e3 * most), cutter.at(1e-9)
    return list(dict.fromkeys((few, *_between(cutter, few, many), many)))


def _between(cutter: Cutter, few: Saved, many: Saved) -> list[Saved]:
    """The sets of the hull strictly between two sets that are on it."""
    if few.bytes >= many.bytes or few.again <= many.again:
        return []
    price = (few.again - many.again) / (many.bytes - few.bytes)
    middle = cutter.at(price)
    gained = few.again + price * few.bytes - (middle.again + price * middle.bytes)
    if middle in (few, many) or gained <= _NOTHING * few.again:
        return []
    return [*_between(cutter, few, middle), middle, *_between(cutter, middle, many)]


def _thinned(points: list[Saved]) -> list[Saved]:
    """At most `_MOST` sets of a hull. Sets are removed one by one, always the one that a mixture of its neighbours
    replaces best."""
    hull = list(points)
    while len(hull) > _MOST:
        hull.pop(min(range(1, len(hull) - 1), key=lambda k: _above(hull[k - 1], hull[k], hull[k + 1])))
    return hull


def _above(few: Saved, point: Saved, many: Saved) -> float:
    """How much longer a mixture of `few` and `many` that saves as many bytes as `point` would take than `point`."""
    share = (point.bytes - few.bytes) / (many.bytes - few.bytes)
    return few.again + share * (many.again - few.again) - point.again
