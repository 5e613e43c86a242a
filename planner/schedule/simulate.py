"""Simulates a program: when each operation runs, and how long a step takes when steps follow each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.machine.hardware import Hardware
from planner.machine.traffic import AHEAD_TRAFFIC_BYTES, CLIPPED_SHARE, UPDATE_TRAFFIC_BYTES
from planner.schedule.chain import Chain
from planner.schedule.compile import Op, OpKind, Program, Queue
from planner.schedule.issuing import issue_s
from planner.schedule.plan import Direction
from planner.schedule.update_work import parameters_of, update_work

STEPS = 4  # a step depends only on the one before it; from the third on, all steps are alike


# Host memory traffic per parameter. In most plans it determines how long an update takes.
_UPDATE_BYTES = {
    OpKind.CPU_UPDATE: UPDATE_TRAFFIC_BYTES,
    OpKind.CPU_WEIGHT: UPDATE_TRAFFIC_BYTES,
    OpKind.CPU_STATES: UPDATE_TRAFFIC_BYTES,
    OpKind.CPU_AHEAD: AHEAD_TRAFFIC_BYTES,
    OpKind.CPU_REPLAY: CLIPPED_SHARE * AHEAD_TRAFFIC_BYTES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When one operation runs, in seconds from the step's start."""

    op: Op
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One simulated step after enough others that steps repeat. `step_s`: seconds from one step to the next. `busy_s`:
    seconds of work per queue in a step. Spans of the CPU may end in the next step."""

    spans: tuple[Span, ...]
    step_s: float
    busy_s: tuple[tuple[Queue, float], ...]


class Durations:
    """How long operations take on their queues if they need not wait and share no cores with others."""

    def __init__(self, options: Sequence[str], chain: Chain, hardware: Hardware) -> None:
        self.hardware = hardware
        self.gpu_work, self.cpu_work = update_work(chain, hardware)
        self.updates = chain.update_rates(hardware)
        self.options = [block.option(name) for block, name in zip(chain.blocks, options, strict=True)]

    def of(self, op: Op, share: float = 1.0) -> float:
        """Seconds that `op` takes. `share`: the number of tokens in the operation's slice (micro-batch), relative to a
        full slice."""
        machine = self.hardware
        match op.kind:
            case OpKind.RUN:
                direction, index, _ = op.turn
                option = self.options[index]
                forward = option.forward_s if direction is not Direction.BACKWARD else 0.0
                backward = option.backward_s if direction is not Direction.FORWARD else 0.0
                return max(share * (forward + backward), issue_s(option, direction, machine))
            case OpKind.FETCH:
                return share * op.bytes / machine.h2d_bytes_per_s
            case OpKind.READ | OpKind.WRITE if op.piece is not None:
                return self._on_drive(op)
            case OpKind.READ | OpKind.PEEK:
                return share * op.bytes / machine.disk_read_bytes_per_s
            case OpKind.WRITE:
                return share * op.bytes / machine.disk_write_bytes_per_s
            case OpKind.SEND:
                return share * op.bytes / machine.d2h_bytes_per_s
            case OpKind.UPDATE:
                return _sum(self.gpu_work, op) / self.updates.gpu
            case kind if kind in _UPDATE_BYTES:
                work = _UPDATE_BYTES[op.kind] / UPDATE_TRAFFIC_BYTES
                return work * _sum(self.cpu_work, op) / self.updates.cpu
        return 0.0

    def issuing(self, op: Op) -> float:
        """Seconds that Python needs to launch the kernels of `op`, a block's run on a slice."""
        direction, index, _ = op.turn
        return issue_s(self.options[index], direction, self.hardware)

    def _on_drive(self, op: Op) -> float:
        """Seconds to read or write a piece. Each piece is read and written, and the drive does one thing at a time: so
        each of the two is taken to last as long as both together, as if they ran beside each other."""
        return op.bytes * self.hardware.disk_s_per_byte


def _sum(work: Mapping[str, float], op: Op) -> float:
    return sum(work[name] for name in op.subject.split(","))


def durations_s(program: Program, chain: Chain, hardware: Hardware, shares: Sequence[float] = ()) -> list[float]:
    """Seconds that each operation takes on its queue if it need not wait. `shares`: for each slice (micro-batch) of the
    step, its number of tokens relative to a full slice; computation and activations are taken to be proportional to it.
    """
    durations = Durations(program.options, chain, hardware)
    alone = [durations.of(op, _share(op, program, shares)) for op in program.ops]
    if hardware.operation_s:
        alone = [max(pair) for pair in zip(alone, issuing_s(program, chain, hardware), strict=True)]
    return _sharing(program, alone, hardware.shared_compute) if hardware.shared_compute else alone


def issuing_s(program: Program, chain: Chain, hardware: Hardware) -> list[float]:
    """For each operation, in program order: the seconds that Python needs to issue it and all operations since the
    previous run of a block, if it is a block's run; 0 for other operations. Other threads issue the latter, but they
    share Python's lock."""
    durations = Durations(program.options, chain, hardware)
    seconds, between = [0.0] * len(program.ops), 0
    turns = [number for number, op in enumerate(program.ops) if op.kind is OpKind.RUN]
    for number in (*range(turns[-1] + 1, len(program.ops)), *range(turns[-1] + 1)):
        if program.ops[number].kind is OpKind.RUN:
            seconds[number] = durations.issuing(program.ops[number]) + between * hardware.operation_s
            between = 0
        else:
            between += 1
    return seconds


def _sharing(program: Program, durations: list[float], part: float) -> list[float]:
    """The durations if computing shares its cores with other queues: a block's run takes longer by a part of the work
    that other queues do at about that time, that is, of what is issued after the run before. What follows the last run
    delays the first run of the next step."""
    turns = [number for number, op in enumerate(program.ops) if op.kind is OpKind.RUN]
    shared, pending = list(durations), 0.0
    for number in (*range(turns[-1] + 1, len(durations)), *range(turns[-1] + 1)):
        op = program.ops[number]
        if op.queue is not Queue.COMPUTE:
            pending += part * durations[number]
        elif op.kind is OpKind.RUN:
            shared[number] += pending
            pending = 0.0
    return shared


def _share(op: Op, program: Program, shares: Sequence[float]) -> float:
    if not shares or not (op.kind is OpKind.RUN or op.moves_activations):
        return 1.0
    return shares[op.round * program.slices + op.turn[2]]


def host_traffic_bytes(program: Program, chain: Chain, shares: Sequence[float] = ()) -> float:
    """Bytes that a step moves through the host's memory: copies and CPU updates. Updates that are done again because
    the norm clips count by the share of steps that clip. `shares`: see `durations_s`."""
    parameters = parameters_of(chain)
    moves = (OpKind.FETCH, OpKind.SEND, OpKind.READ, OpKind.PEEK, OpKind.WRITE)
    moved = (op for op in program.ops if op.kind in moves)
    copies = sum(_share(op, program, shares) * op.bytes for op in moved)
    updates = (_UPDATE_BYTES[op.kind] * parameters[n] for op in program.queue(Queue.CPU) for n in op.subject.split(","))
    return copies + sum(updates)


def written_bytes(program: Program) -> int:
    """Bytes that a step of the program writes to disk."""
    return sum(op.bytes for op in program.queue(Queue.DISK_WRITE))


def least_step_s(program: Program, chain: Chain, hardware: Hardware) -> float:
    """A lower limit of a step's seconds, the largest of three: the time for what moves through the host's memory; if
    the step writes to the drive, the time for all reads and writes, one at a time; and the time to write at the rate
    that the drive sustains for hours."""
    memory_s = host_traffic_bytes(program, chain) / hardware.cpu_memory_bytes_per_s
    sustained = hardware.disk_sustained_bytes_per_s
    written = written_bytes(program)
    drive_s = written / hardware.disk_write_bytes_per_s
    drive_s += sum(op.bytes for op in program.queue(Queue.DISK_READ)) / hardware.disk_read_bytes_per_s
    return max(memory_s, drive_s if written else 0.0, written / sustained if sustained else 0.0)


def simulate(program: Program, chain: Chain, hardware: Hardware, shares: Sequence[float] = ()) -> Timeline:
    """Simulate the program over several steps and return the last one. Each queue does one operation at a time, in
    order, and each operation starts after those for which it waits. `shares`: see `durations_s`."""
    durations = durations_s(program, chain, hardware, shares)
    *_, before, last = _run(program, durations, STEPS)
    busy = {queue: sum(d for d, op in zip(durations, program.ops, strict=True) if op.queue is queue) for queue in Queue}
    return Timeline(
        spans=last.spans(program, last.origin_s), step_s=last.end_s - before.end_s, busy_s=tuple(busy.items())
    )


def last_steps(
    program: Program, chain: Chain, hardware: Hardware, count: int, *, around: int = 0
) -> tuple[tuple[Span, ...], ...]:
    """The spans of the last `count` simulated steps, one tuple per step, with `around` more steps before and after,
    whose operations may overlap them in time. Seconds count from the start of the first of the `count` steps."""
    every = count + 2 * around
    steps = _run(program, durations_s(program, chain, hardware), STEPS - 2 + every)[-every:]
    return tuple(step.spans(program, steps[around].origin_s) for step in steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The start and end of each operation in one simulated step, in seconds. The computing queue's work begins and ends
    it."""

    starts_s: list[float]
    ends_s: list[float]
    origin_s: float
    end_s: float

    def spans(self, program: Program, origin_s: float) -> tuple[Span, ...]:
        times = zip(program.ops, self.starts_s, self.ends_s, strict=True)
        return tuple(Span(op=op, start_s=start - origin_s, end_s=end - origin_s) for op, start, end in times)


def _run(program: Program, durations: list[float], count: int) -> list[_Step]:
    position = {op.name: number for number, op in enumerate(program.ops)}
    waits = [[position[name] for name in op.waits] for op in program.ops]
    before = [0.0] * len(program.ops)
    free = dict.fromkeys(Queue, 0.0)
    steps: list[_Step] = []
    for _ in range(count):
        origin = free[Queue.COMPUTE]
        now = [0.0] * len(program.ops)
        starts = [0.0] * len(program.ops)
        for number, op in enumerate(program.ops):
            ready = max((now[w] if w < number else before[w] for w in waits[number]), default=0.0)
            starts[number] = max(free[op.queue], ready)
            now[number] = free[op.queue] = starts[number] + durations[number]
        before = now
        steps.append(_Step(starts_s=starts, ends_s=now, origin_s=origin, end_s=free[Queue.COMPUTE]))
    return steps
