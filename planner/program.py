"""A plan spelled out as operations on queues, with what each waits for.

`compile_program` writes the operations down in one serial order that is right by itself, one step after another; then
the data each operation touches gives what it must wait for on other queues, and waits implied by others are dropped.
A wait on an operation that stands later in the program means the one of the step before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.chain import Chain, Tensor
from planner.plan import Direction, Plan, Stage


class Queue(StrEnum):
    """COMPUTE on the device, H2D and D2H copies, CPU updates. Each runs its operations in program order."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    CPU = "cpu"


class OpKind(StrEnum):
    """What an operation does; the kind fixes the queue."""

    ALLOC = "alloc"  # device copy of an item
    FREE = "free"
    RUN = "run"  # one turn: a block on a slice
    NORM = "norm"  # norm of a complete gradient
    CLIP = "clip"  # global norm and clip coefficient
    UPDATE = "update"  # optimizer on the device, for one or more tensors
    FETCH = "fetch"
    SEND = "send"
    CPU_UPDATE = "cpu_update"


_QUEUES = {OpKind.FETCH: Queue.H2D, OpKind.SEND: Queue.D2H, OpKind.CPU_UPDATE: Queue.CPU}


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation; `Op.parse(str(op)) == op`.

    `subject`: an item ("w:…", "g:…", "s:…", or "a:3.1", the offloaded activations of block 3, slice 1), a turn
    ("F3.1"), tensor names, comma-separated, or "all". `bytes`: moved, allocated or freed; for an update its scratch.
    A `carried` CPU update works on the gradient of the step before: it is left out right after a drain, and run by the
    drain.
    """

    kind: OpKind
    stage: str
    subject: str
    bytes: int = 0
    waits: tuple[str, ...] = ()
    carried: bool = False

    @property
    def queue(self) -> Queue:
        """The queue that runs it."""
        return _QUEUES.get(self.kind, Queue.COMPUTE)

    @property
    def name(self) -> str:
        """ "fetch@F3:w:l2.up", unique in a program."""
        return f"{self.kind.value}@{self.stage}:{self.subject}"

    @property
    def names(self) -> tuple[str, ...]:
        """The tensor names of an update, norm or clip."""
        return tuple(self.subject.split(","))

    @property
    def turn(self) -> tuple[Direction, int, int]:
        """(direction, block, slice) of a RUN, and (block, slice) with FORWARD for an "a:" item."""
        text = self.subject if self.kind is OpKind.RUN else "F" + self.subject.removeprefix("a:")
        block, _, k = text[1:].partition(".")
        return Direction(text[0]), int(block), int(k)

    def __str__(self) -> str:
        parts = [self.name, f"{self.bytes}B"]
        if self.carried:
            parts.append("carried")
        if self.waits:
            parts.append("after " + " ".join(self.waits))
        return " ".join(parts)

    @classmethod
    def parse(cls, text: str) -> Op:
        """The operation `text` describes. Raises ValueError."""
        head, _, after = text.partition(" after ")
        name, size, *flags = head.split()
        kind, _, rest = name.partition("@")
        stage, _, subject = rest.partition(":")
        return cls(
            kind=OpKind(kind), stage=stage, subject=subject, bytes=int(size.removesuffix("B")),
            waits=tuple(after.split()), carried=flags == ["carried"],
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Operations of one step in serial order. `resident` is what the device holds when the step begins and ends."""

    ops: tuple[Op, ...]
    resident: tuple[str, ...]
    options: tuple[str, ...]
    slices: int = 1
    clip: bool = False

    def queue(self, queue: Queue) -> tuple[Op, ...]:
        """The operations of one queue in order."""
        return tuple(op for op in self.ops if op.queue is queue)


Access = tuple[str, bool]  # (resource, written)


def accesses(op: Op, chain: Chain, options: Sequence[str]) -> Iterator[Access]:
    """The copies an operation reads and writes: "d:" + item on the device, "h:" + item on the host, "clip"."""
    match op.kind:
        case OpKind.ALLOC | OpKind.FREE:
            yield f"d:{op.subject}", True
        case OpKind.FETCH:
            yield f"h:{op.subject}", False
            yield f"d:{op.subject}", True
        case OpKind.SEND:
            yield f"d:{op.subject}", False
            yield f"h:{op.subject}", True
        case OpKind.NORM:
            for name in op.names:
                yield f"d:g:{name}", False
        case OpKind.CLIP:
            yield "clip", True
        case OpKind.UPDATE | OpKind.CPU_UPDATE:
            side = "d" if op.kind is OpKind.UPDATE else "h"
            for name in op.names:
                yield f"{side}:g:{name}", False
                yield f"{side}:w:{name}", True
                yield f"{side}:s:{name}", True
            yield "clip", False
        case OpKind.RUN:
            yield from _turn_accesses(op, chain, options)


def _turn_accesses(op: Op, chain: Chain, options: Sequence[str]) -> Iterator[Access]:
    direction, index, k = op.turn
    block = chain.blocks[index]
    option = block.option(options[index])
    for name in reads(chain, options, direction, index):
        yield f"d:w:{name}", False
    if direction is not Direction.FORWARD:
        for tensor in block.tensors:
            if tensor.trainable:
                yield f"d:g:{tensor.name}", True
    if option.offloaded_bytes:
        yield f"d:a:{index}.{k}", True


def reads(chain: Chain, options: Sequence[str], direction: Direction, index: int) -> tuple[str, ...]:
    """Names of the weights a stage reads."""
    block = chain.blocks[index]
    option = block.option(options[index])
    if direction is Direction.BACKWARD and option.reads_weights is not None:
        return option.reads_weights
    return tuple(tensor.name for tensor in block.tensors)


def compile_program(plan: Plan, chain: Chain) -> Program:
    """The operations of one step under `plan`. Raises ValueError for a plan that does not speak of this chain.

    Whether the plan makes sense is for `planner.verify` to say. Rounds other than 1 are not compiled yet.
    """
    program = order_program(plan, chain)
    return replace(program, ops=_with_waits(program.ops, chain, program.options))


def order_program(plan: Plan, chain: Chain) -> Program:
    """`compile_program` without the waits: all that `planner.memory` needs, in a fraction of the time."""
    if len(plan.options) != len(chain.blocks):
        raise ValueError(f"the plan has {len(plan.options)} blocks, the chain {len(chain.blocks)}")
    if plan.rounds != 1:
        raise ValueError(f"a program of {plan.rounds} rounds; only one round can be compiled")
    return Program(
        ops=tuple(_serial(plan, chain)), resident=plan.resident, options=plan.options, slices=plan.slices,
        clip=plan.clip,
    )  # fmt: skip


def _serial(plan: Plan, chain: Chain) -> Iterator[Op]:
    tensors = {t.name: t for t in (*chain.tensors(), *chain.frame_tensors)}
    sizes = {f"{kind}:{t.name}": _item_bytes(kind, t) for t in tensors.values() for kind in "wgs"}
    unknown = [i for s in plan.stages for i in (*s.prefetch, *s.offload, *s.evict) if i not in sizes]
    if unknown:
        raise ValueError(f"the plan moves what the chain does not have: {', '.join(unknown)}")
    turns = [(stage, k) for stage in plan.stages for k in range(plan.slices)]
    back_at, free_at = _activation_turns(plan, chain, turns)
    sent: set[str] = set()
    for number, (stage, k) in enumerate(turns):
        made = _made(stage, chain)
        if k == 0:
            for item in stage.prefetch:
                yield Op(kind=OpKind.ALLOC, stage=stage.name, subject=item, bytes=sizes[item])
                yield Op(kind=OpKind.FETCH, stage=stage.name, subject=item, bytes=sizes[item])
            for item in stage.offload:
                if item not in made:
                    yield Op(kind=OpKind.SEND, stage=stage.name, subject=item, bytes=sizes[item])
                    sent.add(item)
            for name in () if plan.clip else stage.cpu_update:
                if f"g:{name}" not in made:
                    carried = f"g:{name}" not in sent  # the gradient of the step before
                    yield Op(kind=OpKind.CPU_UPDATE, stage=stage.name, subject=name, carried=carried)
        for item, size in back_at.get(number, ()):
            yield Op(kind=OpKind.ALLOC, stage=stage.name, subject=item, bytes=size)
            yield Op(kind=OpKind.FETCH, stage=stage.name, subject=item, bytes=size)
        yield Op(kind=OpKind.RUN, stage=stage.name, subject=f"{stage.name}.{k}")
        offloaded = chain.blocks[stage.block].option(plan.options[stage.block]).offloaded_bytes
        if stage.direction is Direction.FORWARD and offloaded:
            item = f"a:{stage.block}.{k}"
            yield Op(kind=OpKind.SEND, stage=stage.name, subject=item, bytes=offloaded)
        for item, size in free_at.get(number, ()):
            yield Op(kind=OpKind.FREE, stage=stage.name, subject=item, bytes=size)
        if k == plan.slices - 1:
            yield from _stage_end(stage, plan, chain, tensors, sizes, made, sent)


def _item_bytes(kind: str, tensor: Tensor) -> int:
    return {"w": tensor.bytes, "g": tensor.gradient_bytes, "s": tensor.state_bytes}[kind]


def _made(stage: Stage, chain: Chain) -> frozenset[str]:
    """Items that change during the stage, so that their copy to the host can only start at its end."""
    grads = chain.blocks[stage.block].tensors if stage.direction is not Direction.FORWARD else ()
    return frozenset(
        [f"g:{t.name}" for t in grads if t.trainable] + [f"{kind}:{name}" for name in stage.gpu_update for kind in "ws"]
    )


def _activation_turns(
    plan: Plan, chain: Chain, turns: Sequence[tuple[Stage, int]]
) -> tuple[dict[int, list[tuple[str, int]]], dict[int, list[tuple[str, int]]]]:
    """Turn number -> offloaded activations that come back before it, and that are released after it.

    Both are one turn away from the block's own: the copies have a turn to hide behind.
    """
    at = {(stage.name, k): number for number, (stage, k) in enumerate(turns)}
    back: dict[int, list[tuple[str, int]]] = {}
    free: dict[int, list[tuple[str, int]]] = {}
    for index, block in enumerate(chain.blocks[:-1]):
        size = block.option(plan.options[index]).offloaded_bytes
        for k in range(plan.slices) if size else ():
            forward, backward = at[f"F{index}", k], at[f"B{index}", k]
            free.setdefault(forward + 1, []).append((f"a:{index}.{k}", size))
            back.setdefault(max(forward + 2, backward - 1), []).append((f"a:{index}.{k}", size))
    return back, free


def _stage_end(
    stage: Stage, plan: Plan, chain: Chain, tensors: dict[str, Tensor], sizes: dict[str, int], made: frozenset[str],
    sent: set[str],
) -> Iterator[Op]:  # fmt: skip
    last = stage is plan.stages[-1]
    frame = tuple(t.name for t in chain.frame_tensors if t.trainable)
    if plan.clip:
        complete = tuple(item[2:] for item in sorted(made) if item[0] == "g" and _completes(item[2:], stage, chain))
        if complete:
            yield Op(kind=OpKind.NORM, stage=stage.name, subject=",".join(complete))
        if last:
            if frame:
                yield Op(kind=OpKind.NORM, stage=stage.name, subject=",".join(frame))
            yield Op(kind=OpKind.CLIP, stage=stage.name, subject="all")
    names = (*stage.gpu_update, *(frame if last else ()))
    if names:
        scratch = max(_scratch_bytes(tensors[name]) for name in names)
        yield Op(kind=OpKind.UPDATE, stage=stage.name, subject=",".join(names), bytes=scratch)
    for item in stage.offload:
        if item in made:
            yield Op(kind=OpKind.SEND, stage=stage.name, subject=item, bytes=sizes[item])
            sent.add(item)
    for name in () if plan.clip else stage.cpu_update:
        if f"g:{name}" in made:
            yield Op(kind=OpKind.CPU_UPDATE, stage=stage.name, subject=name)
    if plan.clip and last:
        # Nothing may be updated before the norm is known; what the next step needs first comes first.
        order = {name: number for number, s in enumerate(plan.stages) for name in s.cpu_update}
        first_use = {t.name: i for i, block in reversed(list(enumerate(chain.blocks))) for t in block.tensors}
        for name in sorted(order, key=lambda n: (first_use[n], order[n])):
            yield Op(kind=OpKind.CPU_UPDATE, stage=stage.name, subject=name)
    for item in stage.evict:
        yield Op(kind=OpKind.FREE, stage=stage.name, subject=item, bytes=sizes[item])


def _completes(name: str, stage: Stage, chain: Chain) -> bool:
    """The stage is the last that adds to the gradient of `name`: the backward of its first block."""
    return next(i for i, block in enumerate(chain.blocks) if any(t.name == name for t in block.tensors)) == stage.block


def _scratch_bytes(tensor: Tensor) -> int:
    """The fp32 copy of a narrower gradient that an update on the device needs."""
    return 4 * tensor.elements if tensor.gradient_bytes < 4 * tensor.elements else 0


def _with_waits(serial: tuple[Op, ...], chain: Chain, options: Sequence[str]) -> tuple[Op, ...]:
    """What each operation must wait for on other queues, transitively reduced, in the steady state.

    Three steps are unrolled. Of the operations of one queue that touch the same copies only the latest counts: a queue
    runs in order.
    """
    numbers = {queue: number for number, queue in enumerate(Queue)}
    queue_of = [numbers[op.queue] for op in serial]
    touched = [tuple(accesses(op, chain, options)) for op in serial]
    count = len(serial)
    clocks: list[list[int]] = []  # per unrolled op: the last position known done, per queue
    last_of = [-1] * len(numbers)
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    waits: list[tuple[str, ...]] = [()] * count
    for at in range(3 * count):
        number = at % count
        queue = queue_of[number]
        need = _latest_conflicts(at, touched[number], writer, readers, queue_of)
        need[queue] = -1
        clock = clocks[last_of[queue]] if last_of[queue] >= 0 else [-1] * len(need)
        kept: list[int] = []
        # The latest first: it may imply the earlier ones.
        for other in sorted(need, reverse=True):
            if other >= 0 and clock[queue_of[other % count]] < other:
                kept.append(other)
                clock = [a if a > b else b for a, b in zip(clock, clocks[other], strict=True)]
        clock = list(clock)
        clock[queue] = at
        clocks.append(clock)
        last_of[queue] = at
        if at >= 2 * count:
            kept = [k for k in kept if not any(clocks[o][queue_of[k % count]] >= k for o in kept if o != k)]
            waits[number] = tuple(serial[k % count].name for k in sorted(kept))
    return tuple(replace(op, waits=w) for op, w in zip(serial, waits, strict=True))


def _latest_conflicts(
    at: int, touched: Sequence[Access], writer: dict[str, int], readers: dict[str, list[int]], queue_of: list[int]
) -> list[int]:
    """Per queue the latest operation before `at` that touches the same copy, one of both writing; -1 for none."""
    need = [-1] * len(Queue)
    for resource, written in touched:
        earlier = [writer[resource]] if resource in writer else []
        if written:
            earlier += readers.pop(resource, ())
            writer[resource] = at
        else:
            readers.setdefault(resource, []).append(at)
        for other in earlier:
            queue = queue_of[other % len(queue_of)]
            if other != at and other > need[queue]:
                need[queue] = other
    return need
