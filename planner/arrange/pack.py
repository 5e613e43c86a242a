"""Gives each tensor of a training step a fixed place (offset) in the device's memory, so that little memory is lost
between tensors.

This is dynamic storage allocation with known life spans; `pack.c` describes the method. Without a C compiler only its
first attempts are made, in this module, and more memory is lost.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from planner.cpu import build
from planner.schedule.chain import Chain
from planner.schedule.compile import Program, order_program
from planner.schedule.memory_use import between_bytes
from planner.schedule.places import Span, Spans
from planner.schedule.plan import Plan

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("pack.c")
EFFORT = 200_000_000  # comparisons; they take a second
_ENOUGH = 200  # the search ends when at most a two-hundredth of the least is lost

Sides = tuple[Callable[[Span], bool], ...]
_SIDES: Sides = (
    lambda span: False,
    lambda span: span.group >= 0,
    lambda span: span.group < 0,
    lambda span: span.before > 0,
)


class _Span(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("bytes", "start", "end", "group", "low", "high", "before")]


def can_arrange() -> bool:
    """Whether good places for tensors can be found and used: both need a C compiler."""
    return _library() is not None


def with_places(plan: Plan, chain: Chain) -> Plan:
    """The plan with an offset for each of its tensors, and with the peak bytes that follow. Unchanged if the chain
    does not say what its blocks allocate."""
    if not chain.lifetimes:
        return plan
    program = order_program(plan, chain)
    spans = Spans(program, chain)
    offsets = pack(spans)
    peak_bytes = max(spans.arrangement(offsets).total_bytes, between_bytes(program, chain))
    return replace(plan, offsets=offsets, gpu_peak_bytes=peak_bytes)


def arranged_bytes(program: Program, chain: Chain) -> int:
    """Bytes that the program, and work between two steps, take on the device once each of the program's tensors has a
    fixed place."""
    spans = Spans(program, chain)
    return max(spans.arrangement(pack(spans)).total_bytes, between_bytes(program, chain))


def pack(spans: Spans) -> tuple[int, ...]:
    """An offset in bytes for each span (a tensor's bytes, with the time in which it lives). The same spans always get
    the same offsets; without a C compiler these are other ones than with it. Raises MemoryError if the host has no
    memory for the search."""
    if not spans.spans:
        return ()
    goal = spans.least_bytes() - spans.below_bytes
    library = _library()
    if library is None:
        return _without_compiler(spans.spans, goal)
    c_spans = (_Span * len(spans.spans))(*(_Span(*_as_c(span)) for span in spans.spans))
    offsets = (ctypes.c_int64 * len(c_spans))()
    height = library.pack(c_spans, len(c_spans), goal, goal + goal // _ENOUGH, EFFORT, offsets)
    if height < 0:
        raise MemoryError
    return tuple(offsets)


def _as_c(span: Span) -> tuple[int, ...]:
    return span.bytes, span.start, span.end, span.group, span.low, span.high, span.before


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = build.load(SOURCE)
    except build.CannotBuildError as error:
        log.info("places for tensors: the first that are found, for there is no compiler: %s", error)
        return None
    library.pack.restype = ctypes.c_int64
    library.pack.argtypes = [ctypes.c_void_p, ctypes.c_int32, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return library


def _without_compiler(spans: Sequence[Span], goal: int) -> tuple[int, ...]:
    """The best of the first attempts of `pack.c`, made in Python."""
    order = sorted(range(len(spans)), key=lambda i: (-spans[i].bytes, spans[i].start, i))
    attempts = (_attempt(spans, order, goal, side) for side in _SIDES)
    return min(attempts, key=lambda offsets: max(o + s.bytes for o, s in zip(offsets, spans, strict=True)))


def _attempt(spans: Sequence[Span], order: Sequence[int], goal: int, side: Callable[[Span], bool]) -> tuple[int, ...]:
    """The offsets if each span, in this order, is put at the lowest place that is free throughout its life, or (if
    `side` says so) at the highest below the goal."""
    offsets = [0] * len(spans)
    placed: list[tuple[int, int]] = []
    for i in order:
        span, down = spans[i], side(spans[i])
        offset, floor = -1, 0
        for bottom, other in placed:
            top = bottom + spans[other].bytes
            if top <= floor or not _meet(span, spans[other]):
                continue
            if bottom - floor >= span.bytes:
                offset = bottom - span.bytes if down and bottom <= goal else floor if offset < 0 else offset
                if not down:
                    break
            floor = top
        if down and floor + span.bytes <= goal:
            offset = goal - span.bytes
        offsets[i] = floor if offset < 0 else offset
        placed.append((offsets[i], i))
        placed.sort()
    return tuple(offsets)


def _meet(one: Span, other: Span) -> bool:
    if not ((one.start < other.end and other.start < one.end) or one.before > other.start or other.before > one.start):
        return False
    return one.group < 0 or one.group != other.group or (one.low < other.high and other.low < one.high)
