"""Turns a plan into a program: operations on queues, with what each waits for.

`planner.schedule.serial_order` writes the operations in a serial order that is correct without any waits, if one step
follows another. The data that each operation touches determine for which operations on other queues it must wait. Waits
implied by others are dropped. If an operation waits for one that stands later in the program, the one of the step
before is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.schedule.chain import Chain
from planner.schedule.operations import Access, Op, OpKind, Program, Queue, accesses, overwritten, packed, reads
from planner.schedule.plan import Plan
from planner.schedule.serial_order import serial_order

__all__ = [
    "Op",
    "OpKind",
    "Program",
    "Queue",
    "accesses",
    "compile_program",
    "order_program",
    "overwritten",
    "packed",
    "reads",
]


def compile_program(plan: Plan, chain: Chain) -> Program:
    """The program of one step under `plan`: its operations, with their waits. Raises ValueError for a plan of another
    chain.

    This does not check whether the plan makes sense: `planner.schedule.verify` does.
    """
    program = order_program(plan, chain)
    return replace(program, ops=with_waits(program.ops, chain, program.options))


def order_program(plan: Plan, chain: Chain, *, by_pieces: bool = True) -> Program:
    """The program of one step under `plan`, without waits: enough for `planner.schedule.memory_use`, in a fraction of
    the time. Without `by_pieces`, each update of states on disk is one operation instead of thousands; the device's
    memory is the same."""
    if len(plan.options) != len(chain.blocks):
        raise ValueError(f"the plan has {len(plan.options)} blocks, the chain {len(chain.blocks)}")
    return Program(
        ops=tuple(serial_order(plan, chain, by_pieces=by_pieces)),
        resident=plan.resident,
        options=plan.options,
        slices=plan.slices,
        rounds=plan.rounds,
        clip=plan.clip,
    )


def with_waits(serial: tuple[Op, ...], chain: Chain, options: Sequence[str]) -> tuple[Op, ...]:
    """The operations, each with those on other queues for which it must wait once steps follow each other. Waits
    implied by others are left out.

    Three steps are unrolled. Of the operations of one queue that touch the same copies only the latest counts, since a
    queue runs in order. Neighbours wait as one where that delays nothing. Of several fetches the first waits for the
    allocations of all, since these take no time. Of several releases the first waits for all that the others need,
    since nothing computes between them.
    """
    numbers = {queue: number for number, queue in enumerate(Queue)}
    queue_of = [numbers[op.queue] for op in serial]
    lost = overwritten(chain, serial)
    touched = [tuple(accesses(op, chain, options, lost)) for op in serial]
    count = len(serial)
    clocks: list[list[int]] = []  # per unrolled op: for each queue, the last operation known to have ended
    last_of = [-1] * len(numbers)
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    waits: list[tuple[str, ...]] = [()] * count
    lengths = _neighbours(serial)
    needs: list[list[int]] = []  # what the neighbours that come next wait for, the last neighbour first
    for at in range(3 * count):
        number = at % count
        queue = queue_of[number]
        if not needs:
            length = lengths[number]
            needs = [_latest_conflicts(at + k, touched[number + k], writer, readers, queue_of) for k in range(length)]
            for other in range(len(numbers)) if serial[number].kind is OpKind.FREE else (numbers[Queue.COMPUTE],):
                needs[0][other] = max(need[other] for need in needs)
            needs.reverse()
        need = needs.pop()
        need[queue] = -1
        clock = clocks[last_of[queue]] if last_of[queue] >= 0 else [-1] * len(need)
        remaining: list[int] = []
        # The latest first: it may imply the earlier ones.
        for other in sorted(need, reverse=True):
            if other >= 0 and clock[queue_of[other % count]] < other:
                remaining.append(other)
                clock = [a if a > b else b for a, b in zip(clock, clocks[other], strict=True)]
        clock = list(clock)
        clock[queue] = at
        clocks.append(clock)
        last_of[queue] = at
        if at >= 2 * count:
            remaining = [
                k for k in remaining if not any(clocks[o][queue_of[k % count]] >= k for o in remaining if o != k)
            ]
            waits[number] = tuple(serial[k % count].name for k in sorted(remaining))
    return tuple(replace(op, waits=w) for op, w in zip(serial, waits, strict=True))


def _neighbours(serial: Sequence[Op]) -> list[int]:
    """For each fetch or release: how many operations of the same kind and stage follow directly, itself included; 1 for
    other operations."""
    lengths = [1] * len(serial)
    for number in reversed(range(len(serial) - 1)):
        op, following = serial[number : number + 2]
        if op.kind in (OpKind.FETCH, OpKind.FREE) and (op.kind, op.place) == (following.kind, following.place):
            lengths[number] += lengths[number + 1]
    return lengths


def _latest_conflicts(
    at: int, touched: Sequence[Access], writer: dict[str, int], readers: dict[str, list[int]], queue_of: list[int]
) -> list[int]:
    """Per queue, the latest operation before `at` that touches a copy in `touched`, if one of the two writes it; -1 for
    none. Also records what `at` reads and writes."""
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
