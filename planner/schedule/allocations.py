"""Lists which memory a step allocates and releases on the device, tensor by tensor, in the order in which Python issues
the operations.

`planner.schedule.memory_use` counts bytes; this module is for callers that must know where the bytes are. Only the
computing queue allocates and frees, so its order is that of the allocations. The chain's `lifetimes` say what each
block allocates. This module combines them with the program's items, with gradients, and with what a block's forward
keeps for its backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.schedule.chain import Chain, Lifetimes, Tensor
from planner.schedule.compile import Op, OpKind, Program, Queue
from planner.schedule.items import ACTIVATIONS, STATES, WEIGHT, Item
from planner.schedule.peak_moments import ROWS_AT_ONCE, Rows, lasting_bytes, tied_rows
from planner.schedule.plan import Direction, stage_order

_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Event:
    """Tensor `number` is allocated with `bytes`; 0 bytes mean that it is released. `most`: it may have fewer bytes, or
    stand for several tensors with at most that many together. `own`: it is scratch of one operation alone. `sum_of`:
    name of a weight; the tensor is a copy of that weight's first gradient, to which later gradients are added."""

    number: int
    bytes: int
    most: bool = False
    sum_of: str = ""
    own: bool = False


@dataclass(frozen=True, slots=True)
class Allocations:
    """All device allocations of one step. `standing`: maps each item on the device when the step begins to its tensors
    (number and bytes). `others_bytes`: bytes of buffers and scalars beside them. `steps`: each operation of the
    computing queue with its allocations and releases, in order."""

    standing: dict[str, tuple[Event, ...]]
    others_bytes: int
    steps: tuple[tuple[Op, tuple[Event, ...]], ...]


def allocations(program: Program, chain: Chain) -> Allocations:
    """The device allocations of one step. `program` must be one that `planner.schedule.verify` accepts, and the chain
    must have `lifetimes`."""
    host = _Host(program, chain)
    standing = {item: tuple(Event(n, host.sizes[n]) for n in numbers) for item, numbers in host.items.items()}
    steps = tuple((op, tuple(host.perform(op))) for op in program.ops if op.queue is Queue.COMPUTE)
    frame = sum(t.bytes + t.state_bytes for t in chain.frame_tensors)
    others = lasting_bytes(chain, program.slices, program.rounds) - frame
    return Allocations(standing, others, steps)


@functools.cache
def _events(text: str) -> tuple[tuple[str, str, str], ...]:
    """The words of a text of `Lifetimes`, each as (kind, what, of what)."""
    return tuple((word[0], *word[1:].partition(":")[::2]) for word in text.split())


def _names(text: str) -> list[str]:
    """The names between commas; none if the text is empty, as for the gradients that come to a frozen embedding."""
    return text.split(",") if text else []


@dataclass(slots=True)
class _Call:
    """What a block's forward on a slice (micro-batch) keeps for its backward."""

    lifetimes: Lifetimes
    names: Sequence[str]  # of the saved tensors, as `lifetimes` names them
    saved: list[int]  # numbers of saved tensors that stay on the device
    sizes: Sequence[int]  # bytes of offloaded saved tensors, which come back
    kept: list[int]


class _Host:
    """The tensors that Python holds references to; a tensor is released when its last holder releases it."""

    def __init__(self, program: Program, chain: Chain) -> None:
        self.program, self.chain = program, chain
        self.tensors: dict[str, Tensor] = {t.name: t for t in (*chain.tensors(), *chain.frame_tensors)}
        self.lifetimes = {(lifetimes.kind, lifetimes.option): lifetimes for lifetimes in chain.lifetimes}
        self.stages = {f"{d}{i}": number for number, (d, i) in enumerate(stage_order(len(chain.blocks)))}
        self.users = chain.users()
        self.rows = [tied_rows(chain, program.slices, program.rounds, begun=begun) for begun in (False, True)]
        self.sizes: dict[int, int] = {}
        self.holders: dict[int, int] = {}
        self.items: dict[str, list[int]] = {}
        self.events: list[Event] = []
        self.count = 0
        self.frames: list[dict[str, int]] = [{} for _ in range(program.slices)]
        self.calls: dict[tuple[int, int], _Call] = {}
        self.aside: dict[tuple[str, int], list[int]] = {}
        for tensor in chain.frame_tensors:
            for kind in (WEIGHT, STATES):
                self._allocate(Item.of(kind, tensor.name))
        for item in program.resident:
            self._allocate(item)
        self.events.clear()

    def perform(self, op: Op) -> Iterator[Event]:
        """The allocations and releases of one operation."""
        match op.kind:
            case OpKind.ALLOC:
                self._allocate(op.item)
            case OpKind.FREE:
                for number in self.items.pop(op.item):
                    self._release(number)
            case OpKind.UPDATE:
                self._update(op)
            case OpKind.RUN:
                self._turn(op)
        yield from self.events
        self.events.clear()

    def _new(self, size: int, *, most: bool = False, sum_of: str = "", own: bool = False) -> int:
        number = self.count
        self.count += 1
        self.sizes[number], self.holders[number] = size, 1
        if size:
            self.events.append(Event(number, size, most, sum_of, own))
        return number

    def _release(self, number: int) -> None:
        self.holders[number] -= 1
        if not self.holders[number]:
            del self.holders[number]
            if self.sizes.pop(number):
                self.events.append(Event(number, 0))

    def _hold(self, number: int) -> int:
        self.holders[number] += 1
        return number

    def _allocate(self, item: Item) -> None:
        self.items[item] = [self._new(size) for size in self._sizes(item) if size]

    def _sizes(self, item: Item) -> Sequence[int]:
        """Bytes of each of the item's tensors: a weight or gradient is one tensor, states are moments and perhaps a
        master."""
        if item.kind == ACTIVATIONS:
            block, k = item.turn
            return self.calls[block, k].sizes
        tensor = self.tensors[item.name]
        if item.kind != STATES:
            return [tensor.item_bytes(item.kind)]
        return tensor.state_sizes

    def _update(self, op: Op) -> None:
        """Perform an update on the device. Gradients narrower than fp32 are copied to fp32, together in at most as many
        bytes as the largest copy takes; then come, one by one, tensors that are not updated together."""
        tensors = [self.tensors[name] for name in op.names]
        sizes = [tensor.scratch_bytes for tensor in tensors if tensor.optimizer.together]
        batch: list[int] = []
        for size in sizes:
            if batch and size + sum(self.sizes[n] for n in batch) > max(sizes):
                self._release_all(batch)
            if size:
                batch.append(self._new(size))
        self._release_all(batch)
        for tensor in (tensor for tensor in tensors if not tensor.optimizer.together):
            self._release(self._new(tensor.scratch_bytes))
        for name in op.names:  # the frame's gradients go with their update
            if name not in self.users:
                self._release_all(self.items.pop(Item.gradient(name), []))

    def _release_all(self, numbers: list[int]) -> None:
        while numbers:
            self._release(numbers.pop(0))

    def _turn(self, op: Op) -> None:
        direction, block, k = op.turn
        frame = self.frames[k]
        if direction is Direction.FORWARD and block == 0:
            frame.clear()
        for kind, subject, of in _events(self.chain.frame_lifetimes[self.stages[f"{direction}{block}"]]):
            match kind:
                case "+" | "%":
                    frame[subject] = self._new(int(of), own=kind == "%")
                case "-":
                    if subject in frame:
                        self._release(frame.pop(subject))
                case "@":
                    arguments, _, results = subject.partition(">")
                    if direction is Direction.FORWARD:
                        self._forward(block, k, _names(arguments), _names(results))
                    else:
                        self._backward(op, _names(arguments), _names(results))
                case "!":
                    self._sum(op, int(subject), frame[of])
                case "?":
                    self._sum(op, int(subject), None)
                case "$":
                    self._frame_sum(self.chain.frame_tensors[int(subject)].name, frame, of)
        if direction is Direction.BACKWARD and block == 0:
            for number in frame.values():
                self._release(number)
            frame.clear()

    def _forward(self, block: int, k: int, arguments: Sequence[str], results: Sequence[str]) -> None:
        frame, its = self.frames[k], self._lifetimes_of(block)
        names = {f"a{j}": frame[name] for j, name in enumerate(arguments) if name in frame}
        saved: Sequence[str] = ()
        for kind, subject, of in _events(its.forward):
            match kind:
                case "+" | "~" | "%":
                    names[subject] = self._new(int(of), most=kind == "~", own=kind == "%")
                case "-":
                    self._release(names.pop(subject))
                case "=":
                    self._hand_over(_names(subject), results, names, frame)
                case "^":
                    saved = _names(subject)
        on_device = [self._hold(names[name]) for name in saved]
        sent = [self._hold(names[f"a{its.sent}"])] if its.sent is not None else []
        saved = [*saved, *([f"a{its.sent}"] if sent else [])]
        for name, number in names.items():  # the frame, or `_Call`, now holds what the block's code made
            if name[0] != "a":
                self._release(number)
        inputs = [self._hold(names[f"a{j}"]) for j in its.kept if f"a{j}" in names]
        option = self.chain.blocks[block].option(its.option)
        if option.offloaded_bytes and not option.saved_bytes:  # the saved tensors are offloaded, too
            on_device, sent = [], [*on_device, *sent]
        self.calls[block, k] = _Call(its, saved, on_device, [self.sizes[number] for number in sent], inputs)
        if option.offloaded_bytes:
            self.items[Item.activations(block, k)] = sent

    def _hand_over(
        self, results: Sequence[str], frame_names: Sequence[str], names: dict[str, int], frame: dict[str, int]
    ) -> None:
        for name, to in zip(results, frame_names, strict=True):
            if name != "-" and to != "-" and to not in frame:
                frame[to] = self._hold(names[name])

    def _backward(self, op: Op, tangents: Sequence[str], results: Sequence[str]) -> None:
        _, block, k = op.turn
        frame, call = self.frames[k], self.calls.pop((block, k))
        saved = [*call.saved, *self.items.pop(Item.activations(block, k), ())]
        names = dict(zip(call.names, saved, strict=True))
        owned: dict[str, int] = {}
        for j, name in enumerate(tangents):
            if name in owned:  # one tensor is the gradient of a result and of an argument
                names[f"t{j}"] = self._hold(owned[name])
            elif name.endswith("*"):
                names[f"t{j}"] = owned[name] = frame.pop(name[:-1])
            elif name != "-":
                names[f"t{j}"] = self._hold(frame[name])
        for kind, subject, of in _events(call.lifetimes.backward):
            match kind:
                case "+" | "~" | "%":
                    names[subject] = self._new(int(of), most=kind == "~", own=kind == "%")
                case "-":
                    self._release(names.pop(subject))
                case "!":
                    self._sum(op, int(subject), names[of])
                case "?":
                    self._sum(op, int(subject), None, int(of))
                case "=":
                    self._hand_over(_names(subject), results, names, frame)
        for number in (*names.values(), *call.kept):
            self._release(number)

    def _lifetimes_of(self, block: int) -> Lifetimes:
        return self.lifetimes[self.chain.blocks[block].kind, self.program.options[block]]

    def _sum(self, op: Op, which: int, gradient: int | None, size: int = 0) -> None:
        """Make a slice's gradient of the block's tensor number `which` the sum of gradients (if None: a copy of it), or
        add it to the sum."""
        _, block, k = op.turn
        tensor = self.chain.blocks[block].tensors[which]
        rows = self.rows[op.round > 0].get(tensor.name)
        if rows is not None:
            if block == self.users[tensor.name][0]:
                self._take_up(tensor.name, k, rows)
                return
            if self._put_aside(tensor.name, k, rows):
                return
        item = Item.gradient(tensor.name)
        if item not in self.items:
            if gradient is None:
                self.items[item] = [self._new(size or tensor.gradient_bytes, sum_of=tensor.name)]
            else:
                self.items[item] = [self._hold(gradient)]

    def _put_aside(self, name: str, k: int, rows: Rows) -> bool:
        """Keep the gradient rows that the head's backward made of a tied embedding until the embedding's backward.
        Returns False if they begin the sum instead."""
        self.aside[name, k] = put = [self._new(rows.counts[k] * _INDEX_BYTES, most=True)]
        if Item.gradient(name) not in self.items:
            return False
        put.append(self._new(rows.counts[k] * rows.row_bytes, most=True))
        self._release(self._new(rows.masking_bytes(k)))
        return True

    def _take_up(self, name: str, k: int, rows: Rows) -> None:
        for start in range(0, rows.counts[k], ROWS_AT_ONCE):
            self._release(self._new(min(ROWS_AT_ONCE, rows.counts[k] - start) * rows.row_bytes, most=True))
        self._release_all(self.aside.pop((name, k)))

    def _frame_sum(self, name: str, frame: dict[str, int], gradient_name: str) -> None:
        """Add up a gradient of the frame (the model outside its blocks), as autograd does: the first slice's tensor
        stays as the sum."""
        if Item.gradient(name) not in self.items:
            self.items[Item.gradient(name)] = [self._hold(frame[gradient_name])]
        else:
            self._release(frame.pop(gradient_name))
