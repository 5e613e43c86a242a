"""Runs a program's operations in random orders that its queues and waits allow, on tokens in place of tensors.

A token stands for the content of a copy: of an item on the device or on the host, or of what a slice has computed so
far. An operation makes new tokens of those it reads, so two orders that end with equal tokens computed the same. What
is released holds 0, what is allocated holds what nobody else made; touching released memory is a fault. What an
operation reads and writes is said here anew, not taken from `planner.schedule.compile`, which derives the waits from
it.

Many orders run beside each other: an array has a row per order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.schedule.chain import Chain
from planner.schedule.compile import Op, OpKind, Program, Queue
from planner.schedule.plan import Direction

STEPS = 3  # the first from the drained state, without carried updates
_SINK, _SAME = 0, 1  # columns of the state: written and never read, read and never written
_NEVER = 2**30
_QUEUES = np.arange(len(Queue))

Numbers = NDArray[np.int64]
Tokens = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Wait:
    """`op` waits for `on`, both by their numbers in the program."""

    op: int
    on: int


def waits(program: Program) -> list[Wait]:
    """All waits of a program."""
    number = {op.name: n for n, op in enumerate(program.ops)}
    return [Wait(n, number[name]) for n, op in enumerate(program.ops) for name in op.waits]


@dataclass(frozen=True, slots=True)
class _Effect:
    """Copies that an operation reads, writes and, both ways, needs on the device. `copies`: what it writes is what it
    reads; `frees`: what it writes is gone."""

    reads: Sequence[str] = ()
    writes: Sequence[str] = ()
    alive: Sequence[str] = ()
    copies: bool = False
    frees: bool = False


def _effect(op: Op, program: Program, chain: Chain) -> _Effect:
    overwritten = _overwritten(program, chain)
    device, host = f"d:{op.subject}", f"h:{op.subject}"
    if op.subject[0] == "g" and op.subject[2:] in overwritten:
        host = f"h:w:{op.subject[2:]}"
    match op.kind:
        case OpKind.ALLOC:
            return _Effect(writes=[device])
        case OpKind.FREE:
            return _Effect(writes=[device], alive=[device], frees=True)
        case OpKind.READ if op.subject[0] == "a":
            return _Effect(reads=[f"disk {op.subject}"], writes=[f"slot {op.slot}"], copies=True)
        case OpKind.READ | OpKind.PEEK if "#" in op.subject:
            return _Effect(reads=[f"disk {op.subject}"], writes=[f"slot {op.slot}"])
        case OpKind.WRITE:
            return _Effect(reads=[f"slot {op.slot}"], writes=[f"disk {op.subject}"], copies=True)
        case OpKind.READ:  # no two have the same token: while the same is read once more, nothing is there
            return _Effect(reads=[host], writes=[f"slot {op.slot}"])
        case OpKind.FETCH:
            host = host if op.slot is None else f"slot {op.slot}"
            return _Effect(reads=[host], writes=[device], alive=[device], copies=True)
        case OpKind.SEND:
            host = host if op.slot is None else f"slot {op.slot}"
            return _Effect(reads=[device], writes=[host], alive=[device], copies=True)
        case OpKind.NORM:
            gradients = [f"d:g:{name}" for name in op.names]
            return _Effect(reads=["norms", *gradients], writes=["norms"], alive=gradients)
        case OpKind.CLIP:
            return _Effect(reads=["norms"], writes=["coefficient"])
        case OpKind.CPU_AHEAD | OpKind.CPU_REPLAY:
            before = [f"h:before:{name}" for name in op.names]
            written = [f"h:{kind}:{name}" for name in op.names for kind in "ws"]
            gradients = [f"h:g:{name}" for name in op.names]
            if op.kind is OpKind.CPU_AHEAD:
                return _Effect(reads=[*gradients, *written], writes=[*written, *before])
            return _Effect(reads=["coefficient", *gradients, *before], writes=written)
        case OpKind.UPDATE:
            items = [f"d:{kind}:{name}" for name in op.names for kind in "gws"]
            written = [item for item in items if item[2] != "g"]
            return _Effect(reads=["coefficient", *items], writes=written, alive=items)
        case OpKind.CPU_STATES:
            written = [f"h:g:{op.names[0]}", f"slot {op.slot}"]
            return _Effect(reads=["coefficient", *written], writes=written)
        case OpKind.CPU_UPDATE | OpKind.CPU_WEIGHT:
            (name,) = op.names
            written = [f"h:w:{name}", f"h:s:{name}" if op.slot is None else f"slot {op.slot}"]
            gradient = [] if name in overwritten else [f"h:g:{name}"]
            return _Effect(reads=["coefficient", *written, *gradient], writes=written)
        case OpKind.RUN:
            return _turn_effect(op, chain, program.options)


def _overwritten(program: Program, chain: Chain) -> set[str]:
    """Tensors whose working copy on the host makes room for the gradient: the master is among the states (moments and
    master in fp32), and no round comes back to it."""
    again = (OpKind.CPU_REPLAY, OpKind.CPU_STATES)
    replayed = {name for op in program.ops if op.kind in again for name in op.names}
    return {
        t.name
        for t in chain.tensors()
        if t.state_bytes == 12 * t.elements and program.rounds == 1 and t.name not in replayed
    }


def _turn_effect(op: Op, chain: Chain, options: Sequence[str]) -> _Effect:
    direction, index, k = op.turn
    block = chain.blocks[index]
    if not options:  # evaluation
        weights = [f"d:w:{t.name}" for t in block.tensors]
        return _Effect(reads=[f"slice {k}", *weights], writes=[f"slice {k}"], alive=weights)
    option = block.option(options[index])
    forward, backward = direction is Direction.FORWARD, direction is Direction.BACKWARD
    read = block.tensors
    if backward and option.reads_weights is not None:
        read = tuple(t for t in block.tensors if t.name in option.reads_weights)
    weights = [f"d:w:{t.name}" for t in read]
    sums = [] if forward else [f"d:g:{t.name}" for t in block.tensors if t.trainable]
    activations = [f"d:a:{index}.{k}"] if option.offloaded_bytes else []
    came = activations if backward else []
    return _Effect(
        reads=[f"slice {k}", *weights, *sums, *came],
        writes=[f"slice {k}", *sums, *(activations if forward else [])],
        alive=[*weights, *came],
    )


class Chaos:
    """A program of some steps, ready to run in any order."""

    def __init__(self, program: Program, chain: Chain) -> None:
        self.program = program
        count = len(program.ops)
        effects = [
            _Effect() if step == 0 and op.carried else _effect(op, program, chain)
            for step in range(STEPS)
            for op in program.ops
        ]
        copies = {c for e in effects for c in (*e.reads, *e.writes, *e.alive)}
        column = {copy: n for n, copy in enumerate(sorted(copies), start=2)}
        self._reads = _table([[column[c] for c in e.reads] for e in effects], _SAME)
        self._writes = _table([[column[c] for c in e.writes] for e in effects], _SINK)
        self._alive = _table([[column[c] for c in e.alive] for e in effects], _SAME)
        self._copies, self._frees = np.array([e.copies for e in effects]), np.array([e.frees for e in effects])
        chance = np.random.default_rng(0)
        self._of_op = chance.integers(1, 2**63, len(effects), dtype=np.uint64)
        self._of_place = chance.integers(1, 2**62, self._reads.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._start = _start(program, chain, column)
        self._number = np.arange(len(effects) + 1) % count
        self._place_in_queues(program)
        self._reads_of = [set(effect.reads) for effect in effects[-count:]]

    def is_idle(self, number: int) -> bool:
        """Whether an operation fetches what nobody reads before it is released: which version it fetches is all one."""
        ops = self.program.ops
        if ops[number].kind is not OpKind.FETCH:
            return False
        item = ops[number].subject
        for later in (*range(number + 1, len(ops)), *range(number)):
            if ops[later].kind is OpKind.FREE and ops[later].subject == item:
                return True
            if f"d:{item}" in self._reads_of[later]:
                return False
        return False

    def _place_in_queues(self, program: Program) -> None:
        """`_at[queue, n]`: the n-th operation of a queue. `_need[op, queue]`: how many of the queue must be done."""
        count, numbers = len(program.ops), {op.name: n for n, op in enumerate(program.ops)}
        members = [[n for n, op in enumerate(program.ops) if op.queue is queue] for queue in Queue]
        lengths = np.array([len(m) for m in members])
        self._at = np.full((len(Queue), STEPS * int(lengths.max()) + 1), STEPS * count)
        for queue, m in enumerate(members):
            self._at[queue, : STEPS * len(m)] = [step * count + n for step in range(STEPS) for n in m]
        self.queue_of = [list(Queue).index(op.queue) for op in program.ops]
        need = np.full((count, len(Queue)), -_NEVER)
        for number, op in enumerate(program.ops):
            for other in (numbers[name] for name in op.waits):
                queue = self.queue_of[other]
                before = 0 if other < number else lengths[queue]  # an operation that stands later: of the step before
                need[number, queue] = max(need[number, queue], members[queue].index(other) + 1 - before)
        steps = [need + step * lengths for step in range(STEPS)]
        self._need = np.concatenate([*steps, np.full((1, len(Queue)), _NEVER)])

    def serial(self) -> Tokens:
        """What is to come out: the tokens of the program's own order, all steps."""
        state = np.tile(self._start, (1, 1))
        for op in range(len(self._of_op)):
            self._apply(state, np.array([op]))
        assert state[0, _SINK] != 0, "the program's own order touches what is released"
        return state[0]

    def random(self, orders: int, seed: int) -> Tokens:
        """The tokens of random orders; queues are of different haste in each."""
        return self._run(orders, seed, held=np.full(orders, -1))

    def steered(self, seed: int) -> Tokens:
        """The tokens of an order for each operation that holds it back as long as anything else can run."""
        held = np.arange(len(self._of_op))
        return self._run(len(held), seed, held=held)

    def without(self, removed: Sequence[Wait], seed: int) -> Tokens:
        """For each wait, which is not there, the tokens of two orders in the second dimension: what was waited for is
        held back as long as anything else can run, or comes right after what should have waited."""
        count = len(self.program.ops)
        last = (STEPS - 1) * count
        held = np.array([last + w.on - (0 if w.on < w.op else count) for w in removed for _ in range(2)])
        before = np.array([last + w.op if soon else -1 for w in removed for soon in (False, True)])
        ops = np.array([w.op for w in removed for _ in range(2)])
        queues = np.array([self.queue_of[w.on] for w in removed for _ in range(2)])
        found = self._run(len(held), seed, held=held, before=before, removed=(ops, queues))
        return found.reshape(len(removed), 2, -1)

    def _run(
        self,
        orders: int,
        seed: int,
        *,
        held: Numbers,
        before: Numbers | None = None,
        removed: tuple[Numbers, Numbers] | None = None,
    ) -> Tokens:
        """`held`: per order an operation that comes last of those that can run; or, once `before` has run, first."""
        chance, rows = np.random.default_rng(seed), np.arange(orders)
        haste = 10.0 ** chance.uniform(-2, 2, (orders, len(Queue)))
        state = np.tile(self._start, (orders, 1))
        done = np.zeros((orders, len(Queue)), np.int64)
        soon = np.zeros(orders, bool)
        for _ in range(len(self._of_op)):
            heads = self._at[_QUEUES, done]
            need = self._need[heads]
            if removed is not None:
                of_op = self._number[heads] == removed[0][:, None]
                need[of_op[:, :, None] & (removed[1][:, None] == _QUEUES)[:, None, :]] = -_NEVER
            score = chance.random((orders, len(Queue))) * haste
            score[heads == held[:, None]] = 0
            score[(heads == held[:, None]) & soon[:, None]] = np.inf
            score[(done[:, None, :] < need).any(2)] = -1
            queue = score.argmax(1)
            assert (score[rows, queue] >= 0).all(), "nothing can run"
            self._apply(state, heads[rows, queue])
            if before is not None:
                soon |= heads[rows, queue] == before
            done[rows, queue] += 1
        return state

    def _apply(self, state: Tokens, ops: Numbers) -> None:
        """One operation per row."""
        rows = np.arange(len(ops))[:, None]
        read = state[rows, self._reads[ops]]
        made = (read * self._of_place).sum(1, dtype=np.uint64) + self._of_op[ops]
        made = (made ^ (made >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
        made = np.where(self._copies[ops], read[:, 0], made ^ (made >> np.uint64(29)))
        made[self._frees[ops]] = 0
        fault = (state[rows, self._alive[ops]] == 0).any(1)
        kept = np.where(fault, 0, state[:, _SINK])
        state[rows, self._writes[ops]] = made[:, None]
        state[:, _SINK] = kept


def _table(lists: Sequence[Sequence[int]], fill: int) -> Numbers:
    """The lists as rows of one length, at least one."""
    width = max(1, *map(len, lists))
    return np.array([[*each, *[fill] * (width - len(each))] for each in lists])


def _start(program: Program, chain: Chain, column: dict[str, int]) -> Tokens:
    """The drained state: the host has everything but gradients and activations, the device what is resident."""
    state = np.zeros(len(column) + 2, np.uint64)
    state[[_SINK, _SAME]] = 1
    frame = {t.name for t in chain.frame_tensors}
    for copy, n in column.items():
        side, _, item = copy.partition(":")
        if side != "d" or item in program.resident or item[2:] in frame:
            state[n] = random.Random(item).getrandbits(63)  # the same for device and host
    return state
