"""Writes a drawing of a plan as a timeline in the Trace Event format, which Perfetto and chrome://tracing open.

The timeline has one track per queue, a track of stages (forward or backward of a block) above them, device memory as
counters, and an arrow for every wait. Operations that take no time, such as allocations and releases, are grouped by
their moment on a track of their own: as slices of the trace they would pile up.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from planner.codec import Json
from planner.picture.drawing import AROUND, STEPS, TURNS, Drawing, Sort, sort_of
from planner.schedule.compile import OpKind, Queue
from planner.schedule.memory_use import Parts
from planner.schedule.simulate import Span

_PROCESS = 1
_STAGES = 2  # not 1: a track with the process's number would be shown as its main thread
_TRACKS = {Queue.COMPUTE: 3, Queue.H2D: 4, Queue.D2H: 5, Queue.CPU: 6, Queue.DISK_READ: 7, Queue.DISK_WRITE: 8}
_MOMENTS = 9
_LABELS = {
    Queue.COMPUTE: "GPU computes",
    Queue.H2D: "copies to the GPU",
    Queue.D2H: "copies to the host",
    Queue.CPU: "CPU updates",
    Queue.DISK_READ: "reads from disk",
    Queue.DISK_WRITE: "writes to disk",
}
_COLOURS = {  # names chrome://tracing knows; Perfetto chooses by the event's name
    Sort.FORWARD: "thread_state_running",
    Sort.BACKWARD: "thread_state_iowait",
    Sort.HEAD: "thread_state_runnable",
    Sort.UPDATE: "good",
}


def trace(drawing: Drawing) -> dict[str, Json]:
    """The timeline as a JSON object. Times are in microseconds, exact to the nanosecond."""
    events: list[Json] = [*_names(drawing)]
    clock = _Clock(min(ns(span.start_s) for _, span in drawing.occasions()))
    for step in range(AROUND, AROUND + STEPS):
        events += _stages(drawing, step, clock)
    events += _operations(drawing, clock)
    events += _moments(drawing, clock)
    events += _memory(drawing, clock)
    events += _waits(drawing, clock)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": drawing.title}}


def _names(drawing: Drawing) -> Iterator[Json]:
    title = drawing.title or "offmate plan"
    yield {"ph": "M", "pid": _PROCESS, "tid": 0, "name": "process_name", "args": {"name": title}}
    queues = ((_TRACKS[queue], _LABELS[queue]) for queue in Queue)
    for track, label in ((_STAGES, "stages"), *queues, (_MOMENTS, "in no time")):
        place: dict[str, Json] = {"ph": "M", "pid": _PROCESS, "tid": track}
        yield {**place, "name": "thread_name", "args": {"name": label}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": track}}


@dataclass(frozen=True, slots=True)
class _Clock:
    """Converts times to microseconds since the first operation. A copy may begin before its step computes, and no time
    in the file may be negative."""

    zero_ns: int

    def us(self, at_ns: int) -> float:
        return (at_ns - self.zero_ns) / 1000

    def during(self, start_s: float, end_s: float) -> dict[str, Json]:
        """The time fields of a slice of the trace."""
        start_ns, end_ns = ns(start_s), ns(end_s)
        return {"ts": self.us(start_ns), "dur": (end_ns - start_ns) / 1000}


def _slice(name: str, sort: Sort, track: int, args: dict[str, Json]) -> dict[str, Json]:
    return {"ph": "X", "name": name, "cat": sort.value, "pid": _PROCESS, "tid": track, "args": args}


def _stages(drawing: Drawing, step: int, clock: _Clock) -> Iterator[Json]:
    """Slices of the trace for stages: each from the first computation for the stage to the end of what the computing
    queue does for it."""
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    for span in drawing.steps[step]:
        if span.op.queue is Queue.COMPUTE:
            if span.op.kind is OpKind.RUN:
                began.setdefault(span.op.place, span.start_s)
            if span.op.place in began:
                ended[span.op.place] = span.end_s
    stages = {stage.name: stage for stage in drawing.plan.stages}
    for place in began:
        stage = stages[place.partition("/")[0]]
        block = drawing.chain.blocks[stage.block]
        args: dict[str, Json] = {
            "step": step - AROUND,
            "block": block.name,
            "option": drawing.plan.options[stage.block],
            "does": str(stage),
        }
        event = _slice(str(stage), TURNS[stage.direction], _STAGES, args)
        yield event | clock.during(began[place], ended[place])


def _operations(drawing: Drawing, clock: _Clock) -> Iterator[Json]:
    for step, span in drawing.occasions():
        if not _takes_time(span):
            continue
        op, sort = span.op, sort_of(span.op)
        args: dict[str, Json] = {"step": step - AROUND, "stage": op.place, "subject": op.subject}
        if op.bytes:
            args["bytes"] = op.bytes
        if op.waits:
            args["waits"] = " ".join(op.waits)
        event = _slice(op.name, sort, _TRACKS[op.queue], args) | clock.during(span.start_s, span.end_s)
        yield event | ({"cname": _COLOURS[sort]} if sort in _COLOURS else {})


def _moments(drawing: Drawing, clock: _Clock) -> Iterator[Json]:
    """One instant for all operations that take no time at one moment. It says how many of each kind there are, and on
    which tensors."""
    moments: dict[int, dict[str, list[str]]] = {}
    for _, span in drawing.occasions():
        if not _takes_time(span):
            kinds = moments.setdefault(ns(span.start_s), {})
            kinds.setdefault(span.op.kind.value, []).append(span.op.subject)
    for at_ns, kinds in sorted(moments.items()):
        args: dict[str, Json] = {kind: " ".join(subjects) for kind, subjects in kinds.items()}
        name = ", ".join(f"{len(subjects)} {kind}" for kind, subjects in kinds.items())
        yield {
            "ph": "i",
            "s": "t",
            "name": name,
            "cat": Sort.MEMORY.value,
            "pid": _PROCESS,
            "tid": _MOMENTS,
            "ts": clock.us(at_ns),
            "args": args,
        }


def _memory(drawing: Drawing, clock: _Clock) -> Iterator[Json]:
    """Counters of device memory, which keep their value until the next event. The budget is a counter of its own:
    within another one it would be stacked on the rest."""
    for sample in drawing.samples():
        args: dict[str, Json] = {name.removesuffix("_bytes"): getattr(sample.parts, name) for name in Parts.__slots__}
        place: dict[str, Json] = {"ph": "C", "pid": _PROCESS, "tid": 0, "ts": clock.us(ns(sample.start_s))}
        yield {**place, "name": "GPU bytes", "args": args}
        total: dict[str, Json] = {"bytes": sample.parts.total_bytes}
        yield {**place, "name": "GPU in use", "args": total}
        if drawing.plan.gpu_budget_bytes:
            yield {**place, "name": "GPU budget", "args": {"bytes": drawing.plan.gpu_budget_bytes}}


def _waits(drawing: Drawing, clock: _Clock) -> Iterator[Json]:
    """Arrows from each operation to those that waited for it. A wait for an operation later in the program means the
    step before.

    An arrow is tied to the slice around its time stamp. An operation that takes no time has no such slice: its arrows
    begin at the operation before it on its queue, and end at the one after it.
    """
    position = {op.name: place for place, op in enumerate(drawing.program.ops)}
    spans = [span for step in drawing.steps for span in step]
    shown = {id(span) for _, span in drawing.occasions()}
    size = len(drawing.program.ops)
    sources, targets = _timed(spans), _timed(spans[::-1])[::-1]
    drawn: set[tuple[int, int]] = set()
    numbers = count(1)
    for place, span in enumerate(spans):
        for name in span.op.waits:
            waited = place - place % size + position[name]
            waited -= size if waited >= place else 0
            source, target = sources[waited] if waited >= 0 else None, targets[place]
            if source is None or target is None or not {id(source), id(target)} <= shown:
                continue
            if (id(source), id(target)) in drawn:
                continue
            drawn.add((id(source), id(target)))
            yield from _arrow(source, target, next(numbers), clock)


def _timed(spans: Sequence[Span]) -> list[Span | None]:
    """For each operation: itself if it takes time, else the last one before it on its queue that does; None if there
    is none."""
    last: dict[Queue, Span] = {}
    timed: list[Span | None] = []
    for span in spans:
        if _takes_time(span):
            last[span.op.queue] = span
        timed.append(last.get(span.op.queue))
    return timed


def _takes_time(span: Span) -> bool:
    return ns(span.end_s) > ns(span.start_s)


def _arrow(source: Span, target: Span, number: int, clock: _Clock) -> Iterator[Json]:
    # Neighbouring slices touch: a time stamp one nanosecond inside makes clear which slice is meant.
    for phase, queue, at_ns in (
        ("s", source.op.queue, ns(source.end_s) - 1),
        ("f", target.op.queue, ns(target.start_s) + 1),
    ):
        event: dict[str, Json] = {
            "ph": phase,
            "id": number,
            "name": "wait",
            "cat": "wait",
            "pid": _PROCESS,
            "tid": _TRACKS[queue],
            "ts": clock.us(at_ns),
        }
        yield event | ({"bp": "e"} if phase == "f" else {})


def ns(seconds: float) -> int:
    """`seconds` in whole nanoseconds. Operations that touch still touch after rounding."""
    return round(seconds * 1e9)
