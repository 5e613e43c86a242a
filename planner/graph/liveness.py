"""Predicts the peak memory of a generated function from its steps, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from planner.graph.codegen import Step
from planner.graph.nodes import StorageId, Storages
from planner.graph.scratch import Scratch


class _Live:
    """The storages that are alive, each with the nodes that hold it. Storages of the caller (`foreign`) are held but
    not counted."""

    def __init__(self, storages: Storages) -> None:
        self.storages = storages
        self.holders: dict[StorageId, set[object]] = {}
        self.foreign: set[StorageId] = set()
        self.now = self.peak = 0

    def grow(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def hold(self, node: fx.Node) -> None:
        for storage in self.storages.of[node]:
            if storage not in self.holders:
                self.holders[storage] = set()
                if storage not in self.foreign:
                    self.grow(self.storages.bytes.get(storage, 0))
            self.holders[storage].add(node)

    def borrow(self, node: fx.Node) -> None:
        self.foreign.update(s for s in self.storages.of[node] if s not in self.holders)
        self.hold(node)

    def drop(self, node: fx.Node) -> None:
        for storage in self.storages.of[node]:
            holders = self.holders.get(storage, set())
            if node in holders:
                holders.discard(node)
                if not holders:
                    del self.holders[storage]
                    if storage not in self.foreign:
                        self.now -= self.storages.bytes.get(storage, 0)


def peak_bytes(
    steps: Sequence[Step],
    storages: Storages,
    *,
    borrowed: Sequence[fx.Node] = (),
    owned: Sequence[fx.Node] = (),
    adoptable: Mapping[str, bool] | None = None,
    scratch: Mapping[fx.Node, int | Scratch] | None = None,
) -> int:
    """The most bytes that are alive while a generated function runs `steps`, above what is alive at its start.

    Values of `borrowed` belong to the caller throughout. Values of `owned` exist at the start and are freed after
    their last use. `adoptable`: given for the first micro-batch of a step, where each weight's gradient stays as the
    sum over micro-batches: either itself (True) or in a fresh buffer (False). None for a later micro-batch, where a
    gradient is added to a sum that is not counted, and is freed. `scratch`: node -> what its operation allocates while
    it runs, beside its result; an int in bytes.
    """
    live = _Live(storages)
    again: dict[fx.Node, int] = {}
    for node in borrowed:
        live.borrow(node)
    for node in owned:
        live.hold(node)
    start = live.peak = live.now
    for step in steps:
        for a in step.node.all_input_nodes:
            if not any(s in live.holders for s in storages.of[a]):
                live.borrow(a)  # neither saved nor made here: a weight, an input, an incoming gradient
        # The node runs again although one of its results was saved: the storage of that result exists twice.
        twice = sum(storages.bytes.get(s, 0) for s in storages.of[step.node] if s[0] is step.node and s in live.holders)
        again[step.node] = twice
        before = live.now
        live.grow(twice)
        live.hold(step.node)
        match (scratch or {}).get(step.node):
            case Scratch() as its:
                live.peak = max(live.peak, before + its.peak_bytes)
            case int(size):
                live.peak = max(live.peak, live.now + size)
        for weight in step.sinks if adoptable is not None else ():
            assert adoptable is not None
            if adoptable[weight]:
                live.holders[storages.of[step.node][0]].add(("sum", weight))
            else:
                value = step.node.meta["val"]
                live.grow(value.numel() * value.element_size())
        for node in step.dead:
            live.drop(node)
            live.now -= again.pop(node, 0)
    return live.peak - start
