"""Computes all that is shown of a plan: two training steps in steady state, with the operations on each queue, device
memory, and how busy each resource is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from planner.machine.hardware import Hardware
from planner.picture.basis import Basis
from planner.reports.receipt import Load
from planner.schedule.chain import Chain
from planner.schedule.compile import Op, OpKind, Program, Queue, compile_program
from planner.schedule.items import ACTIVATIONS, GRADIENT, STATES, WEIGHT
from planner.schedule.measured import Measured
from planner.schedule.memory_use import Breakdown, Parts, gpu_breakdown
from planner.schedule.plan import Direction, Plan
from planner.schedule.simulate import Span, host_traffic_bytes, last_steps, least_step_s, simulate

STEPS = 2  # steps that are shown
AROUND = 1  # further steps on each side: a queue may still be in the step before, or already in the step after


class Sort(StrEnum):
    """What an operation is about. The sort sets its colour on the page and its category in the trace."""

    FORWARD = "forward"
    HEAD = "head"
    BACKWARD = "backward"
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    STATES = "states"
    ACTIVATIONS = "activations"
    UPDATE = "update"
    MEMORY = "memory"  # allocation and release, which take no time
    NORM = "norm"


TURNS = {Direction.FORWARD: Sort.FORWARD, Direction.HEAD: Sort.HEAD, Direction.BACKWARD: Sort.BACKWARD}
_ITEMS = {WEIGHT: Sort.WEIGHTS, GRADIENT: Sort.GRADIENTS, STATES: Sort.STATES, ACTIVATIONS: Sort.ACTIVATIONS}


def sort_of(op: Op) -> Sort:
    """What the operation `op` is about: a kind of computing, the kind of tensor that it moves, or memory."""
    match op.kind:
        case OpKind.RUN:
            return TURNS[op.turn[0]]
        case OpKind.FETCH | OpKind.SEND | OpKind.READ | OpKind.PEEK | OpKind.WRITE:
            return _ITEMS[op.item.kind]
        case OpKind.NORM | OpKind.CLIP:
            return Sort.NORM
        case OpKind.ALLOC | OpKind.FREE:
            return Sort.MEMORY
    return Sort.UPDATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What device memory holds from `start_s` to `end_s`, in seconds from the start of the first step shown. A sample
    of length zero is a peak at one moment."""

    start_s: float
    end_s: float
    parts: Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """All that is shown of a plan: the plan, its program (the operations on each queue), and the program's simulated
    times.

    `steps` holds each step's operations with start and end, in program order, in seconds from the start of the first
    step shown, which is number `AROUND`. `memory` has one breakdown per operation of the computing queue, the same in
    every step. `loads`: how busy each resource is, the busiest first. `queues_step_s`: seconds of a step by the queues
    alone. `step_s`: the predicted seconds of a step, which the host's memory bandwidth may make longer. `measured`:
    two steps of a real run of this program.
    """

    title: str
    plan: Plan
    chain: Chain
    hardware: Hardware
    basis: Basis
    program: Program
    steps: tuple[tuple[Span, ...], ...]
    memory: tuple[Breakdown, ...]
    loads: tuple[Load, ...]
    queues_step_s: float
    step_s: float
    measured: Measured | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second for micro-batches of the largest shape; None if the chain does not say how many tokens one
        has."""
        tokens = self.plan.rounds * self.plan.slices * self.chain.slice_tokens
        return tokens / self.step_s if tokens and self.step_s else None

    @property
    def end_s(self) -> float:
        """When the device stops computing in the last step shown, in seconds from the start of the first."""
        return max(span.end_s for span in self.steps[AROUND + STEPS - 1] if span.op.queue is Queue.COMPUTE)

    def occasions(self) -> Iterator[tuple[int, Span]]:
        """Yields (step's number, operation with its times) for all operations in the steps shown, and for operations
        of other steps that run meanwhile."""
        end_s = self.end_s
        for step, spans in enumerate(self.steps):
            shown = AROUND <= step < AROUND + STEPS
            yield from ((step, span) for span in spans if shown or (span.end_s > 0 and span.start_s < end_s))

    def samples(self) -> Iterator[Sample]:
        """Yields what device memory holds over the steps shown, without overlaps, in order of time."""
        for step in self.steps[AROUND : AROUND + STEPS]:
            spans = [span for span in step if span.op.queue is Queue.COMPUTE]
            yield from _samples(spans, self.memory)


def draw(
    plan: Plan, chain: Chain, hardware: Hardware, *, title: str, basis: Basis, measured: Measured | None = None
) -> Drawing:
    """Compile the plan to a program, simulate it, and count its memory over time. `measured`: times of a real run,
    ignored if they are of another program. Raises ValueError for a plan that does not fit this chain."""
    program = compile_program(plan, chain)
    timeline = simulate(program, chain, hardware)
    host_s = host_traffic_bytes(program, chain) / hardware.cpu_memory_bytes_per_s
    busy = {**{_RESOURCES[queue]: s for queue, s in timeline.busy_s}, "host memory bandwidth": host_s}
    step_s = max(timeline.step_s, least_step_s(program, chain, hardware))
    loads = [Load(resource=name, busy_s=s, share=min(1.0, s / step_s)) for name, s in busy.items() if s]
    return Drawing(
        title=title,
        plan=plan,
        chain=chain,
        hardware=hardware,
        basis=basis,
        program=program,
        steps=last_steps(program, chain, hardware, STEPS, around=AROUND),
        memory=tuple(gpu_breakdown(program, chain)),
        loads=tuple(sorted(loads, key=lambda load: -load.busy_s)),
        queues_step_s=timeline.step_s,
        step_s=step_s,
        measured=measured if measured is not None and measured.is_of(program) else None,
    )


_RESOURCES = {
    Queue.COMPUTE: "GPU",
    Queue.H2D: "link to the GPU",
    Queue.D2H: "link from the GPU",
    Queue.CPU: "CPU updates",
    Queue.DISK_READ: "reads from disk",
    Queue.DISK_WRITE: "writes to disk",
}


def _samples(spans: list[Span], memory: tuple[Breakdown, ...]) -> Iterator[Sample]:
    now, resting, shown = spans[0].start_s, memory[-1].after, 0
    moment: Parts | None = None  # the largest since `now` among operations that take no time
    for span, breakdown in zip(spans, memory, strict=True):
        if span.start_s > now:
            if moment is not None and moment.total_bytes > max(shown, resting.total_bytes):
                yield Sample(start_s=now, end_s=now, parts=moment)
            yield Sample(start_s=now, end_s=span.start_s, parts=resting)
            now, shown, moment = span.start_s, resting.total_bytes, None
        if span.end_s > span.start_s:
            if moment is not None and moment.total_bytes > max(shown, breakdown.peak.total_bytes):
                yield Sample(start_s=now, end_s=now, parts=moment)
            yield Sample(start_s=span.start_s, end_s=span.end_s, parts=breakdown.peak)
            now, shown, moment = span.end_s, breakdown.peak.total_bytes, None
        elif moment is None or breakdown.peak.total_bytes > moment.total_bytes:
            moment = breakdown.peak
        resting = breakdown.after
    if moment is not None and moment.total_bytes > shown:
        yield Sample(start_s=now, end_s=now, parts=moment)
