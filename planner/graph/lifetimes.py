"""Writes the memory that a block's generated code allocates and frees as text: one line for forward, one for backward.

    forward    "+0:4096 +1:512 -0 +2:4096 =2 ^1"
    backward   "-t0 +3:4096 !1:3 -1 -3 =t0,-"

`+3:4096`   storage 3, of 4096 bytes, is allocated
`~3:4096`   an area: at most 4096 bytes in any number of tensors
`%3:4096`   an operation allocates storage 3 as its scratch, for itself alone (`planner.graph.scratch`)
`-3`        storage 3 is freed: the code does not use it any more, or, for scratch, the operation does not
`!1:3`      storage 3 is the gradient of the block's parameter 1, and may itself become the sum over micro-batches
`?1:512`    the gradient of parameter 1 may not become the sum, which takes 512 bytes of its own
`=2,-`      results: of forward the block's outputs, of backward the gradients of its arguments; "-": none
`^1,4`      the storages that forward hands to backward, in order

Storages are numbered through both lines. `a0` is the memory of the block's first tensor argument, `t0` that of the
first gradient that backward gets. Weights and buffers do not appear.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from planner.graph.codegen import Step
from planner.graph.nodes import StorageId, Storages, nbytes
from planner.graph.scratch import Scratch


class Tape:
    """Writes the two lines for one block's code, in the form described at the top of this module. Call `forward`
    first: `backward` continues its numbers."""

    def __init__(
        self, storages: Storages, names_of: Mapping[fx.Node, str | None], scratch: Mapping[fx.Node, Scratch]
    ) -> None:
        """`names_of`: placeholder -> the name of its memory (`a0`, `t0`), None for a weight or a buffer; `scratch`:
        node -> the scratch of its operation."""
        self._storages, self._scratch = storages, scratch
        self._given: dict[StorageId, str | None] = {}
        for node, name in names_of.items():
            for storage in storages.of[node]:
                self._given.setdefault(storage, name)
        self._names = dict(self._given)
        self._count = 0
        self._holders: dict[str, set[fx.Node]] = {}

    def forward(self, steps: Sequence[Step], outputs: Sequence[fx.Node], saved: Sequence[fx.Node]) -> str:
        """The line for a forward that runs `steps`, returns `outputs`, and hands `saved` to backward."""
        events = list(self._steps(steps, {}, {}))
        self._holders.clear()
        return " ".join([*events, f"={self._list(outputs)}", f"^{self._list(saved)}"])

    def backward(
        self,
        steps: Sequence[Step],
        saved: Sequence[fx.Node],
        tangents: Sequence[fx.Node],
        results: Sequence[fx.Node | None],
        numbers: Mapping[str, int],
        adoptable: Mapping[str, bool],
    ) -> str:
        """The line for a backward that runs `steps`, gets the values `saved` and the gradients `tangents`, and returns
        `results`. `numbers`: weight -> its number; `adoptable`: weight -> whether its gradient may itself become the
        sum over micro-batches."""
        used = {a for step in steps for a in step.node.all_input_nodes} | {r for r in results if r is not None}
        saved_names = {storage: self._names[storage] for node in saved for storage in self._storages.of[node]}
        self._names = self._given | saved_names  # a value that is computed again gets another storage
        events: list[str] = []
        for node in (*saved, *tangents):
            self._hold(node)
        for node in (*saved, *tangents):
            if node not in used:
                events += self._drop(node)
        events += self._steps(steps, numbers, adoptable)
        return " ".join([*events, f"={self._list(results)}"])

    def _steps(self, steps: Sequence[Step], numbers: Mapping[str, int], adoptable: Mapping[str, bool]) -> Iterator[str]:
        again: dict[fx.Node, list[str]] = {}
        for step in steps:
            node = step.node
            coming = [s for s in self._storages.of[node] if s not in self._names or s[0] is node]
            if (scratch := self._scratch.get(node)) is not None:
                names: dict[int, str] = {}
                for number, size in scratch.events:
                    storage = node, scratch.results.get(number, -1)
                    if storage in coming:
                        coming.remove(storage)
                        yield from self._come(storage, again)
                    elif size:
                        names[number] = name = self._number()
                        yield f"%{name}:{size}"
                    elif number in names:
                        yield f"-{names.pop(number)}"
                yield from (f"-{name}" for name in names.values())
            for storage in coming:
                yield from self._come(storage, again)
            self._hold(node)
            for weight in step.sinks:
                if adoptable[weight]:
                    yield f"!{numbers[weight]}:{self._names[self._storages.of[node][0]]}"
                else:
                    yield f"?{numbers[weight]}:{_dense_bytes(node)}"
            for dead in step.dead:
                yield from self._drop(dead)
                yield from (f"-{name}" for name in again.pop(dead, ()))

    def _come(self, storage: StorageId, again: dict[fx.Node, list[str]]) -> Iterator[str]:
        size = self._storages.bytes.get(storage, 0)
        if storage not in self._names:
            self._names[storage] = name = self._number()
            yield f"+{name}:{size}"
        elif self._names[storage] is not None:
            # The node runs again although this result of it was saved: its storage exists twice.
            again.setdefault(storage[0], []).append(name := self._number())
            yield f"+{name}:{size}"

    def _number(self) -> str:
        self._count += 1
        return str(self._count - 1)

    def _hold(self, node: fx.Node) -> None:
        for storage in self._storages.of[node]:
            if (name := self._names.get(storage)) is not None and name[0] != "a":
                self._holders.setdefault(name, set()).add(node)

    def _drop(self, node: fx.Node) -> Iterator[str]:
        for storage in self._storages.of[node]:
            name = self._names.get(storage)
            holders = self._holders.get(name or "", set())
            if name is not None and node in holders:
                holders.discard(node)
                if not holders:
                    yield f"-{name}"

    def _list(self, nodes: Sequence[fx.Node | None]) -> str:
        names = (self._names.get(self._storages.of[n][0]) if n is not None else None for n in nodes)
        return ",".join(name or "-" for name in names)


def with_areas_of(text: str, other: str) -> str:
    """`text`, a line of lifetimes, with the sizes of its areas (`~`) replaced by those of the areas of the line
    `other`, in order."""
    sizes = iter(re.findall(r"~\d+:(\d+)", other))
    return re.sub(r"~(\d+):\d+", lambda match: f"~{match[1]}:{next(sizes)}", text)


def _dense_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size()) or nbytes(value)
