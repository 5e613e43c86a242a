"""Forecasts when jobs begin and end: simulates the queue with a clock that jumps from event to event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.keys.window import Span, Window

MOST_NIGHTS = 100  # nobody plans further
_MOST_TURNS = 1000  # for all jobs together


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A job of the queue, as the forecast sees it. `left_s`: the seconds for which it still needs the GPU, None where
    that is not known. `stop_s`: how many seconds before its window's end it stops. It begins not before `begin_at`, and
    after the job `after` has ended. `blocked`: something without a known end keeps it from starting: a person, a full
    disk, or a hub that is not reached."""

    id: int
    left_s: float | None
    stop_s: float = 0.0
    window: Window | None = None
    begin_at: float = 0.0
    after: int | None = None
    blocked: bool = False
    running: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The forecast for a job: when it begins or continues, and when it is done, in seconds since 1970; None where that
    cannot be known. `nights`: how many openings of its window (the hours in which it may have the GPU) it takes, the
    current one included; where `ends_at` is None, it takes more than these. 0 where the job has no window, or is not
    known to end."""

    starts_at: float | None = None
    ends_at: float | None = None
    nights: int = 0


UNKNOWN = Expected()


def forecast(queue: Sequence[Work], now: float) -> dict[int, Expected]:
    """Job number -> when the job begins and ends. `queue`: the jobs in the order in which they start, the running one
    among them. `now`: seconds since 1970. Jobs about which nothing is known are left out, and so is everything after a
    job's first `MOST_NIGHTS` nights."""
    spans = _Spans()
    expected: dict[int, Expected] = {}
    unfinished = {work.id for work in queue}
    remaining = {work.id: work for work in queue}
    clock = now
    for _ in range(_MOST_TURNS):
        waiting = [
            work
            for work in remaining.values()
            if not work.blocked and (work.after is None or work.after not in unfinished)
        ]
        if not waiting:
            break
        work = min(waiting, key=lambda work: spans.turn(work, clock))  # the first one, where several are equal
        at = max(clock, spans.turn(work, clock))
        begun = expected.get(work.id, Expected(starts_at=at))
        if work.left_s is None:  # the begin of all jobs behind it is unknown
            expected[work.id] = begun
            break
        span = spans.at(work.window, at) if work.window is not None else None
        over = at + work.left_s
        nights = begun.nights + (span is not None)
        if span is not None and over > span.closes - work.stop_s:
            stops = max(at, span.closes - work.stop_s)
            remaining[work.id] = replace(
                work, left_s=work.left_s - (stops - at), begin_at=spans.after(work, span), running=False
            )
            expected[work.id] = replace(begun, nights=nights)
            clock = stops
            if nights >= MOST_NIGHTS:
                break
            if work.stop_s >= span.closes - span.opens:  # no night is long enough for a step: its end is unknown
                del remaining[work.id]
        else:
            expected[work.id] = replace(begun, ends_at=over, nights=nights)
            del remaining[work.id]
            unfinished.discard(work.id)
            clock = over
    return {
        number: each if each.ends_at is not None or each.nights >= MOST_NIGHTS else replace(each, nights=0)
        for number, each in expected.items()
    }


class _Spans:
    """Finds when windows open and close; each time span is computed once, as most jobs of a queue have the same
    window."""

    def __init__(self) -> None:
        self._found: dict[tuple[Window, float], Span] = {}

    def at(self, window: Window, at: float) -> Span:
        """The times at which `window` opens and closes: those around the time `at`, if it is open then, else the next
        ones."""
        if (span := self._found.get((window, at))) is None:
            span = self._found[window, at] = window.span(at)
        return span

    def after(self, work: Work, span: Span) -> float:
        """The time at which a job's window opens again after `span`, in seconds since 1970."""
        assert work.window is not None
        return max(span.closes, self.at(work.window, span.closes).opens)

    def turn(self, work: Work, clock: float) -> float:
        """The earliest time from `clock` on at which a job may begin, in seconds since 1970; -1 for the running job,
        which comes before all others."""
        at = max(clock, work.begin_at)
        if work.running and (work.window is None or self.at(work.window, clock).opens <= clock):
            return -1.0
        if work.window is None:
            return at
        span = self.at(work.window, at)
        return self.after(work, span) if at >= span.closes - work.stop_s else max(at, span.opens)
