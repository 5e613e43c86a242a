"""Defines the operations of a program: their queues, their text form, and the copies of data that each reads and
writes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from planner.schedule.chain import Chain
from planner.schedule.items import ACTIVATIONS, GRADIENT, WEIGHT, Item
from planner.schedule.plan import Direction
from planner.schedule.state_pieces import Piece


class Queue(StrEnum):
    """The queues of a program: COMPUTE (the device), H2D and D2H (copies to and from the device), CPU (updates),
    DISK_READ and DISK_WRITE (the drive). Each queue runs its operations one after another, in program order."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    CPU = "cpu"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"


class OpKind(StrEnum):
    """What an operation does. The kind determines the queue."""

    ALLOC = "alloc"  # allocate the device copy of an item
    FREE = "free"  # release the device copy of an item
    RUN = "run"  # run a block on a slice (micro-batch), forward or backward
    NORM = "norm"  # compute the norm of a complete gradient
    CLIP = "clip"  # compute the global norm and the clip coefficient
    UPDATE = "update"  # optimizer on the device, for one or more tensors
    FETCH = "fetch"  # copy an item from the host to the device
    SEND = "send"  # copy an item from the device to the host
    CPU_UPDATE = "cpu_update"  # optimizer on the CPU
    CPU_AHEAD = "cpu_ahead"  # a CPU update before the norm is known, as if it did not clip; the old values are kept
    READ = "read"  # read from disk into a host memory slot; a fetch or an update follows
    WRITE = "write"  # write from a slot to disk: what was sent, updated states, or an updated working copy
    PEEK = "peek"  # read a piece of states from disk that the following operation does not change
    CPU_WEIGHT = "cpu_weight"  # a CPU update whose new states are not kept: the states on disk trail the weight
    CPU_STATES = "cpu_states"  # the same update in the next step, from the same gradient, to keep the new states
    CPU_REPLAY = "cpu_replay"  # the update ahead done again from the old values, if the norm does clip


_QUEUES = {
    OpKind.FETCH: Queue.H2D,
    OpKind.SEND: Queue.D2H,
    OpKind.READ: Queue.DISK_READ,
    OpKind.PEEK: Queue.DISK_READ,
    OpKind.WRITE: Queue.DISK_WRITE,
    OpKind.CPU_UPDATE: Queue.CPU,
    OpKind.CPU_AHEAD: Queue.CPU,
    OpKind.CPU_REPLAY: Queue.CPU,
    OpKind.CPU_WEIGHT: Queue.CPU,
    OpKind.CPU_STATES: Queue.CPU,
}


_DIRECTIONS = {direction.value: direction for direction in Direction}  # five times as fast as `Direction(value)`
_OF_ITEMS = frozenset((OpKind.ALLOC, OpKind.FREE, OpKind.FETCH, OpKind.SEND, OpKind.READ, OpKind.WRITE, OpKind.PEEK))
_WHOLE = ((OpKind.READ, GRADIENT), (OpKind.WRITE, GRADIENT), (OpKind.WRITE, WEIGHT))


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Op:
    """One operation of a program; never changed. `Op.parse(str(op)) == op`.

    `stage` and `round` say where in the step the operation stands; `place` is both ("F3", and "F3/1" in the second
    round). `subject`: an item ("w:NAME"), a block's run on a slice ("F3.1": forward of block 3 on slice 1),
    comma-separated tensor names, or "all"; "NAME#3" in an update is piece 3 of the tensor. `bytes`: moved, allocated or
    freed; for an update, its scratch. `waits`: the names of the operations that must end before it starts. `slot`: the
    number of the host memory slot (a reused buffer) that the operation reads into, takes data from, or works in. A
    `carried` CPU update works on the gradient of the step before. A drain (finishing all pending updates) runs it, too,
    so the step right after a drain leaves it out.
    """

    kind: OpKind
    stage: str
    subject: str
    bytes: int = 0
    waits: tuple[str, ...] = ()
    carried: bool = False
    round: int = 0
    slot: int | None = None
    _name: str = field(default="", init=False, repr=False, compare=False)  # made once, as each step asks for it

    @property
    def queue(self) -> Queue:
        """The queue that runs the operation."""
        return _QUEUES.get(self.kind, Queue.COMPUTE)

    @property
    def place(self) -> str:
        """The stage ("F3"), followed in rounds after the first by the round's number ("F3/1")."""
        return f"{self.stage}/{self.round}" if self.round else self.stage

    @property
    def name(self) -> str:
        """Kind, place and subject, such as "fetch@F3:w:l2.up"; unique in a program."""
        if not self._name:
            self._name = f"{self.kind.value}@{self.place}:{self.subject}"
        return self._name

    @property
    def item(self) -> Item:
        """The item that the operation allocates, frees or moves."""
        return self.subject if isinstance(self.subject, Item) else Item(self.subject)

    @property
    def moves_activations(self) -> bool:
        """Whether the operation allocates, frees or moves activations."""
        return self.kind in _OF_ITEMS and self.item.kind == ACTIVATIONS

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors that an update, norm or clip works on, or ("all",)."""
        return tuple(self.subject.partition("#")[0].split(","))

    @property
    def piece(self) -> int | None:
        """The number of the piece of optimizer states that the operation reads, updates or writes; None if it concerns
        all of a tensor's states, or none."""
        number = self.subject.partition("#")[2]
        return int(number) if number else None

    @property
    def passes_whole(self) -> bool:
        """Whether the operation reads or writes a whole gradient, or writes a whole updated weight, of a tensor that is
        entirely on disk. (The states of such a tensor pass piece by piece.)"""
        return self.kind in _OF_ITEMS and (self.kind, self.item.kind) in _WHOLE

    @property
    def turn(self) -> tuple[Direction, int, int]:
        """The triple (direction, block, slice) of a RUN, which runs one block on one slice; (FORWARD, block, slice) if
        the operation moves activations."""
        if self.kind is not OpKind.RUN:
            return Direction.FORWARD, *self.item.turn
        block, _, k = self.subject[1:].partition(".")
        return _DIRECTIONS[self.subject[0]], int(block), int(k)

    def __str__(self) -> str:
        parts = [self.name, f"{self.bytes}B"]
        if self.carried:
            parts.append("carried")
        if self.slot is not None:
            parts.append(f"slot{self.slot}")
        if self.waits:
            parts.append("after " + " ".join(self.waits))
        return " ".join(parts)

    @classmethod
    def parse(cls, text: str) -> Op:
        """The operation that `text`, a result of `str(op)`, describes. Raises ValueError."""
        head, _, after = text.partition(" after ")
        name, size, *flags = head.split()
        kind, _, location = name.partition("@")
        place, _, subject = location.partition(":")
        stage, _, number = place.partition("/")
        return cls(
            kind=OpKind(kind),
            stage=stage,
            subject=subject,
            bytes=int(size.removesuffix("B")),
            waits=tuple(after.split()),
            carried="carried" in flags,
            round=int(number or 0),
            slot=next((int(flag.removeprefix("slot")) for flag in flags if flag.startswith("slot")), None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The operations of one step, in a serial order that is valid by itself.

    `resident`: the items on the device when the step begins and when it ends. `options`: the option's name per block.
    `slices`: micro-batches of one round. A program without `options` is one of `planner.schedule.forward_program`:
    every block runs forward, and nothing is kept for backward.
    """

    ops: tuple[Op, ...]
    resident: tuple[Item, ...]
    options: tuple[str, ...]
    slices: int = 1
    rounds: int = 1
    clip: bool = False

    @property
    def trains(self) -> bool:
        """Whether the program has a backward pass."""
        return bool(self.options)

    def queue(self, queue: Queue) -> tuple[Op, ...]:
        """The operations of one queue, in the order in which they run."""
        return tuple(op for op in self.ops if op.queue is queue)


Access = tuple[str, bool]  # (resource, written)


def overwritten(chain: Chain, ops: Sequence[Op]) -> frozenset[str]:
    """Names of the tensors whose gradient overwrites their working copy on the host.

    Not among them are tensors whose update is done again if the norm clips, or whose states on disk are updated a step
    later: these read the gradient after the update has computed the working copy anew.
    """
    rounds = ops[-1].round + 1
    again = {name for op in ops if op.kind in (OpKind.CPU_REPLAY, OpKind.CPU_STATES) for name in op.names}
    lost = {t.name for t in chain.tensors() if t.trainable and not (t.on_disk or t.host_gradient_bytes(rounds))}
    return frozenset(lost - again)


def packed(chain: Chain, ops: Sequence[Op]) -> frozenset[str]:
    """Names of the tensors whose fp32 masters are kept without their upper halves on the host (`Chain.packs`): the CPU
    updates them, and their working copy, which restores the upper halves, is still there at the update."""
    updated = {name for op in ops if op.queue is Queue.CPU for name in op.names}
    able = {t.name for t in chain.tensors() if chain.packs and t.shared_bytes and not t.states_on_disk}
    return frozenset((updated & able) - overwritten(chain, ops))


def accesses(op: Op, chain: Chain, options: Sequence[str], overwritten: Collection[str]) -> Iterator[Access]:
    """The copies of data that an operation reads or writes, each as (name, whether it is written).

    Names are "d:" + item for a copy on the device, "h:" + item for one on the host, "slot:" + number for a host memory
    slot, "disk:" + piece or item, and "clip" for the clip coefficient. For a tensor that is entirely on disk, "h:g:"
    and "h:w:" stand for what its slot holds for its update. `overwritten`: see the function of that name.
    """
    match op.kind:
        case OpKind.RUN:  # the first, as it is frequent
            yield from _turn_accesses(op, chain, options)
        case OpKind.ALLOC | OpKind.FREE:
            yield f"d:{op.subject}", True
        case OpKind.READ | OpKind.PEEK:
            yield f"disk:{op.subject}", False
            yield f"slot:{op.slot}", True
            if op.item.kind == GRADIENT:
                yield f"h:{op.subject}", True
        case OpKind.WRITE:
            yield f"slot:{op.slot}", False
            yield f"disk:{op.subject}", True
            if op.item.kind == WEIGHT:
                yield f"h:{op.subject}", False
        case OpKind.FETCH:
            yield f"h:{op.subject}" if op.slot is None else f"slot:{op.slot}", False
            yield f"d:{op.subject}", True
        case OpKind.SEND:
            yield f"d:{op.subject}", False
            yield f"h:{op.subject}" if op.slot is None else f"slot:{op.slot}", True
            if op.item.kind == GRADIENT and op.item.name in overwritten:
                yield f"h:{Item.weight(op.item.name)}", True
        case OpKind.NORM:
            for name in op.names:
                yield f"d:g:{name}", False
        case OpKind.CLIP:
            yield "clip", True
        case OpKind.CPU_STATES:  # counts as a write of the gradient, so that the next gradient waits for it
            for name in op.names:
                yield f"h:g:{name}", True
            yield f"slot:{op.slot}", True
            yield "clip", False
        case OpKind.UPDATE | OpKind.CPU_UPDATE | OpKind.CPU_AHEAD | OpKind.CPU_REPLAY | OpKind.CPU_WEIGHT:
            side = "d" if op.kind is OpKind.UPDATE else "h"
            for name in op.names:
                yield f"{side}:g:{name}", False
                yield f"{side}:w:{name}", True
                yield f"{side}:s:{name}" if op.slot is None else f"slot:{op.slot}", True
            if op.kind is not OpKind.CPU_AHEAD:
                yield "clip", False


def _turn_accesses(op: Op, chain: Chain, options: Sequence[str]) -> Iterator[Access]:
    direction, index, k = op.turn
    block = chain.blocks[index]
    for name in reads(chain, options, direction, index):
        yield f"d:w:{name}", False
    if not options:
        return
    option = block.option(options[index])
    if direction is not Direction.FORWARD:
        for tensor in block.tensors:
            if tensor.trainable:
                yield f"d:g:{tensor.name}", True
    if option.offloaded_bytes:
        yield f"d:a:{index}.{k}", True


def reads(chain: Chain, options: Sequence[str], direction: Direction, index: int) -> tuple[str, ...]:
    """Names of the weights that the forward or backward of block `index` reads."""
    block = chain.blocks[index]
    if direction is Direction.BACKWARD:
        read = block.option(options[index]).reads_weights
        if read is not None:
            return read
    return tuple(tensor.name for tensor in block.tensors)


SLOTS = 4
"""Number of host memory slots through which weights come from disk, one tensor each: while one is copied to the device,
the others are read ahead."""


def slots_of(chain: Chain) -> dict[str, int]:
    """Maps each tensor on disk to the number of its host memory slot. Slots are assigned in rotation, so that
    neighbours have different ones in forward and in backward."""
    return {t.name: number % SLOTS for number, t in enumerate(t for t in chain.tensors() if t.on_disk)}


STATE_SLOTS = 6
"""Number of host memory slots through which optimizer states come from disk and go back, one piece each: while one is
updated, others are read ahead of it and written behind it."""


def state_slots_of(chain: Chain, *, clip: bool) -> dict[str, tuple[tuple[Piece, int], ...]]:
    """Maps each tensor whose optimizer states may be on disk to its pieces, each with the number of its host memory
    slot.

    Slots are assigned in the order of updates: without clipping from the chain's last tensor to its first, as backward
    produces gradients; with clipping, where updates follow the norm, from first to last.
    """
    each = [(t.name, piece) for t in chain.tensors() if t.states_on_disk for piece in chain.state_pieces(t)]
    slots: dict[str, list[tuple[Piece, int]]] = {}
    for number, (name, piece) in enumerate(each if clip else reversed(each)):
        slots.setdefault(name, []).append((piece, SLOTS + number % STATE_SLOTS))
    return {name: tuple(of) for name, of in slots.items()}


ACTIVATION_SLOTS = 3
"""Number of host memory slots through which activations go to disk and come back, those of one block and slice each:
while one slot is written (or read), others are copied from the device (or to it)."""
FIRST_ACTIVATION_SLOT = SLOTS + STATE_SLOTS


def activation_slots() -> Iterator[int]:
    """The numbers of the slots for activations, endlessly in rotation: each is used again after all others."""
    return itertools.cycle(range(FIRST_ACTIVATION_SLOT, FIRST_ACTIVATION_SLOT + ACTIVATION_SLOTS))


GRADIENT_SLOTS = 3
"""Number of host memory slots through which gradients of tensors entirely on disk go there and come back for their
updates: while one is updated, the next is read, and the new weight of the one before is written."""
FIRST_GRADIENT_SLOT = FIRST_ACTIVATION_SLOT + ACTIVATION_SLOTS


def gradient_slots_of(chain: Chain) -> dict[str, int]:
    """Maps each trained tensor that is entirely on disk to the number of the slot for its gradient. Slots are assigned
    in rotation, as in `slots_of`."""
    stored = (t for t in chain.tensors() if t.wholly_on_disk)
    return {t.name: FIRST_GRADIENT_SLOT + number % GRADIENT_SLOTS for number, t in enumerate(stored)}


def ring_at_turn(slices: int, items: int = ACTIVATION_SLOTS) -> int:
    """How many of `items` stored activations stay in the host memory slots between forward and backward, instead of
    going to disk. They are those of the last blocks, which backward fetches first: as many blocks as fit with all their
    slices."""
    return min(items, ACTIVATION_SLOTS // slices * slices)
