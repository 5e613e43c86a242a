"""Proves, before anything runs, that a program is right.

Order: any two operations that touch the same copy of data, one of them writing, are ordered by queues and waits,
whatever the queues' speeds. A drain (finishing all pending updates) and the step after it leave operations out, but the
others keep their places, so the order holds. Content: every read finds current data. Updates: every trainable tensor is
updated exactly once a step. Memory: the peak is within the budget, and if tensors have fixed places, no two that exist
at the same time overlap. Cycle: a step ends with the same items on the device with which it begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.schedule.chain import Chain
from planner.schedule.compile import OpKind, Program, Queue, accesses, overwritten
from planner.schedule.contents import Contents, InvalidProgram
from planner.schedule.forward_program import ForwardBytes, forward_peak_bytes
from planner.schedule.memory_use import gpu_peak_bytes
from planner.schedule.places import Misplaced, Spans
from planner.schedule.plan import Direction, stage_order

__all__ = ["InvalidProgram", "verify"]

_CYCLES = 3  # the first from the drained state, the second after it, the third steady


def verify(
    program: Program,
    chain: Chain,
    *,
    gpu_budget_bytes: int | None = None,
    measured: ForwardBytes | None = None,
    offsets: Sequence[int] = (),
) -> None:
    """Check a program; raises InvalidProgram with the first thing that is wrong. `measured`: the bytes of a program
    that only runs forward; None for a training step. `offsets`: byte offsets of tensors in the device's memory, in the
    order of `Spans`; empty if tensors have no fixed places."""
    names = [op.name for op in program.ops]
    if len(set(names)) != len(names):
        raise InvalidProgram(f"an operation stands twice: {next(n for n in names if names.count(n) > 1)}")
    _turns_are_complete(program, chain)
    _conflicts_are_ordered(program, chain)
    _contents_are_right(program, chain)
    if gpu_budget_bytes is not None:
        if offsets:  # counted tensor by tensor: more exact than adding up what blocks need at most
            peak = _proven_places(program, chain, offsets)
        else:
            peak = gpu_peak_bytes(program, chain) if measured is None else forward_peak_bytes(program, chain, measured)
        if peak > gpu_budget_bytes:
            raise InvalidProgram(f"the peak is {peak} bytes, the budget {gpu_budget_bytes}")


def _proven_places(program: Program, chain: Chain, offsets: Sequence[int]) -> int:
    """The bytes of the arrangement with these offsets. Raises InvalidProgram where two tensors would overlap."""
    spans = Spans(program, chain)
    if len(offsets) != len(spans.spans) or min(offsets) < 0:
        raise InvalidProgram(f"there are {len(offsets)} places for {len(spans.spans)} tensors")
    arrangement = spans.arrangement(offsets)
    try:
        spans.prove(arrangement)
    except Misplaced as error:
        raise InvalidProgram(str(error)) from None
    return arrangement.total_bytes


def _turns_are_complete(program: Program, chain: Chain) -> None:
    """Check that in every round every block runs each slice once per direction, stage by stage, slices in order."""
    count = len(chain.blocks)
    stages = stage_order(count) if program.trains else tuple((Direction.FORWARD, index) for index in range(count))
    order = [f"{direction}{index}.{k}" for direction, index in stages for k in range(program.slices)]
    wanted = [(number, turn) for number in range(program.rounds) for turn in order]
    turns = [(op.round, op.subject) for op in program.ops if op.kind is OpKind.RUN]
    if turns != wanted:
        odd = next((pair for pair in zip(turns, wanted, strict=False) if pair[0] != pair[1]), None)
        raise InvalidProgram(f"turns are {odd[0] if odd else len(turns)}, expected {odd[1] if odd else len(wanted)}")


def _conflicts_are_ordered(program: Program, chain: Chain) -> None:
    """Check that of two conflicting accesses one happens before the other, by vector clocks over unrolled steps."""
    ops, count = program.ops, len(program.ops)
    position = {op.name: number for number, op in enumerate(ops)}
    for op in ops:
        unknown = [name for name in op.waits if name not in position]
        if unknown:
            raise InvalidProgram(f"{op.name} waits for what is not in the program: {unknown[0]}")
    queue_of = [list(Queue).index(op.queue) for op in ops]
    waits = [[position[name] for name in op.waits] for op in ops]
    lost = overwritten(chain, program.ops)
    touched = [tuple(accesses(op, chain, program.options, lost)) for op in ops]
    clocks: list[list[int]] = []
    last: dict[int, int] = {}
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}

    def need(earlier: int, later: int, resource: str) -> None:
        if clocks[later][queue_of[earlier % count]] < earlier:
            first, second = ops[earlier % count].name, ops[later % count].name
            raise InvalidProgram(f"{first} and {second} both touch {resource}, and nothing orders them")

    for at in range(_CYCLES * count):
        number = at % count
        queue = queue_of[number]
        clock = list(clocks[last[queue]]) if queue in last else [-1] * len(Queue)
        for wait in waits[number]:
            other = at - number + wait if wait < number else at - number + wait - count
            if other >= 0:
                clock = [max(a, b) for a, b in zip(clock, clocks[other], strict=True)]
        clock[queue] = at
        clocks.append(clock)
        last[queue] = at
        for resource, written in touched[number]:
            if resource in writer and writer[resource] != at:
                need(writer[resource], at, resource)
            if written:
                for reader in readers.pop(resource, ()):
                    if reader != at:
                        need(reader, at, resource)
                writer[resource] = at
            else:
                readers.setdefault(resource, []).append(at)


def _contents_are_right(program: Program, chain: Chain) -> None:
    """Check what is where over several steps: from a state without pending updates into the steady one, then through a
    drain (which finishes all pending updates) and one more step."""
    contents = Contents(program, chain)
    carried = tuple(op for op in program.ops if op.carried)
    for cycle in range(_CYCLES):
        _one_step(contents, drained=cycle == 0)
    for op in carried:  # a drain runs what the last step left to the next one
        contents.apply(op)
    _one_step(contents, drained=True)


def _one_step(contents: Contents, *, drained: bool) -> None:
    """Apply a step's operations; after a drain, carried operations, which belong to the step before, have nothing to
    do."""
    contents.updated = {}
    for op in contents.program.ops:
        if not (drained and op.carried):
            contents.apply(op)
    contents.end_step()
    carried = {n for op in contents.program.ops if op.carried and op.kind is OpKind.CPU_UPDATE for n in op.names}
    for name in (contents.trainable | contents.frame) - (carried if drained else set()):
        if contents.updated.get(name, 0) != contents.program.trains:
            raise InvalidProgram(f"{name} is updated {contents.updated.get(name, 0)} times a step")
