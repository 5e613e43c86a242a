"""Streams that run late, in any order that they and their events allow.

What a stream is given runs when the mood says so, or when somebody waits for it. There is no thread of the device's
own: whoever gives a stream work, or waits, runs what is to run.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mood:
    """How late things run.

    haste      of the default stream and, in turn, of all others: the chance that work runs before somebody waits, drawn
               again whenever a stream is given something
    stumble    the chance that a thread that turns to another stream sleeps for a moment
    held       work of this name (`Queues.named`) comes after everything else that can run, or
    until      where this is given, right after the work of that name
    """

    seed: int = 0
    haste: tuple[float, ...] = (1.0,)
    stumble: float = 0.0
    held: str | None = None
    until: str | None = None

    @classmethod
    def drawn(cls, seed: int) -> Mood:
        """In turn all ways to have computing, copies down and copies up at once or as late as can be, and any haste."""
        chance = random.Random(seed)
        haste = tuple(float(seed >> bit & 1) for bit in range(3))
        if seed % 8 == 7:  # all at once is what the CPU does
            haste = tuple(chance.choice((0.0, 0.1, 0.5, 1.0)) for _ in range(3))
        return cls(seed=seed, haste=haste, stumble=chance.choice((0.0, 0.0, 0.05, 0.3)))


@dataclass(slots=True, eq=False)
class Marker:
    """A place in a stream, and when it was passed."""

    stream: Stream
    done: bool = False
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Work:
    """One of three: something to run, a place to pass, a place to wait for."""

    name: str | None
    run: Callable[[], object] | None
    mark: Marker | None
    after: Marker | None

    def must_wait(self) -> bool:
        return self.after is not None and not self.after.done


class Stream:
    """Work that runs in order. Nothing orders it with that of another stream but events."""

    def __init__(self, queues: Queues, number: int) -> None:
        self.queue: deque[_Work] = deque()
        self.number, self._queues = number, queues

    def wait_event(self, event: Event) -> None:
        """Go on when the event's last recording, as it is now, is passed."""
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """Go on when `other` has done what it has been given by now."""
        self._queues.give(self, after=self._queues.mark(other))

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, here."""
        event = event or Event(self._queues)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Return when all it was given is done."""
        self._queues.waited("Stream.synchronize", True)
        self._queues.until(self._queues.mark(self))

    def query(self) -> bool:
        """Whether all it was given is done."""
        return not self.queue


class Event:
    """A place in a stream. Recording it again moves it: who waited before waits for the place before. One that was
    never recorded holds nobody up."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._last: Marker | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Move it to this place of the stream, or of the thread's current one."""
        self._last = self._queues.mark(stream or self._queues.current)

    def wait(self, stream: Stream | None = None) -> None:
        """Let the stream, or the thread's current one, wait for it."""
        if self._last is not None:
            self._queues.give(stream or self._queues.current, after=self._last)

    def query(self) -> bool:
        """Whether it is passed."""
        return self._last is None or self._last.done

    def synchronize(self) -> None:
        """Return when it is passed."""
        self._queues.waited("Event.synchronize", False)
        if self._last is not None:
            self._queues.until(self._last)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        assert self._last is not None and end._last is not None
        return (end._last.at_s - self._last.at_s) * 1e3


class Queues:
    """All streams.

    patience    called before held work runs because somebody waits: returns when no other thread can go on either
    error       the first one that work has raised; as on a device, nothing runs from then on
    """

    def __init__(self, waited: Callable[[str, bool], None]) -> None:
        """`waited(what, seen)` is told when the host waits; `seen`: torch's debug mode takes notice."""
        self.waited = waited
        self.lock, self._thread = threading.RLock(), threading.local()
        self.patience: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        self.default = Stream(self, 0)
        self._count = 1
        self._busy: dict[Stream, None] = {}
        self.set_mood(Mood())

    def new_stream(self) -> Stream:
        """One more."""
        self._count += 1
        return Stream(self, self._count - 1)

    def rest(self) -> None:
        """Do what is left, and begin anew: no error, nothing held, all at once."""
        with self.lock:
            self.set_mood(Mood())
            self.finish()
            self.patience, self.error = lambda: None, None

    def set_mood(self, mood: Mood) -> None:
        """From now on."""
        with self.lock:
            self._mood, self._chance = mood, random.Random(mood.seed)
            self._held, self._reached = mood.held is not None, None

    @property
    def name(self) -> str | None:
        """Of what this thread gives to streams."""
        return getattr(self._thread, "name", None)

    @name.setter
    def name(self, name: str | None) -> None:
        self._thread.name = name

    @property
    def current(self) -> Stream:
        """The thread's current stream."""
        return getattr(self._thread, "stream", None) or self.default

    def set_current(self, stream: Stream) -> None:
        """Make it the thread's current one."""
        self._thread.stream = stream

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Inside, `stream` is the thread's current one."""
        if self._mood.stumble and random.random() < self._mood.stumble:
            time.sleep(random.random() * 2e-3)
        before = self.current
        self._thread.stream = stream or before
        try:
            yield
        finally:
            self._thread.stream = before

    def give(
        self,
        stream: Stream,
        run: Callable[[], object] | None = None,
        *,
        mark: Marker | None = None,
        after: Marker | None = None,
    ) -> None:
        """Queue work; then run what the mood likes. Raises what went wrong on the device."""
        with self._alone():
            self.check()
            self._add(stream, _Work(self.name, run, mark, after))
            going = True
            while going:
                going = False
                for one in list(self._busy):
                    while one.queue and self._hasty(one) and self._step(one):
                        going = True

    def add(
        self,
        stream: Stream,
        run: Callable[[], object] | None = None,
        *,
        mark: Marker | None = None,
        name: str | None = None,
    ) -> None:
        """Queue work; run nothing."""
        with self.lock:
            self._add(stream, _Work(name, run, mark, None))

    def _add(self, stream: Stream, work: _Work) -> None:
        stream.queue.append(work)
        self._busy[stream] = None

    def mark(self, stream: Stream) -> Marker:
        """This place in the stream."""
        marker = Marker(stream)
        self.give(stream, mark=marker)
        return marker

    def until(self, marker: Marker) -> None:
        """Return when the place is passed. No more than that needs to run; a little more does, now and then."""
        if not marker.done and self._held:
            self.patience()
        with self._alone():
            for _ in range(0 if self._held else self._chance.choice((0, 0, 1, 8))):
                if self._busy:
                    self._step(self._chance.choice(list(self._busy)))
            self._need(marker)
        self.check()

    def finish(self) -> None:
        """Return when all streams are done."""
        if self._held:
            self.patience()
        with self._alone():
            while self._busy:
                stream = next(iter(self._busy))
                marker = Marker(stream)
                self.add(stream, mark=marker)
                self._need(marker)

    def check(self) -> None:
        """Raise what went wrong on the device."""
        if self.error is not None:
            raise RuntimeError(f"CUDA error: {self.error!r}") from self.error

    def _hasty(self, stream: Stream) -> bool:
        number, haste = stream.number, self._mood.haste
        if number:
            number = 1 + (number - 1) % max(1, len(haste) - 1)
        chance = haste[min(number, len(haste) - 1)]
        return chance == 1 or self._chance.random() < chance

    def _need(self, marker: Marker) -> None:
        while not marker.done:
            head = marker.stream.queue[0]
            if head.must_wait():
                assert head.after is not None
                self._need(head.after)
            self._step(marker.stream, needed=True)

    def _step(self, stream: Stream, *, needed: bool = False) -> bool:
        """Run the next work of a stream; whether something has changed."""
        work = stream.queue[0]
        if work.must_wait():
            return False
        if self._held and work.name is not None:
            if self._reached is stream and work.name != self._mood.until:
                self._held = False
                self._run_held()
                return True
            if work.name == self._mood.until:
                self._reached = stream
            elif work.name == self._mood.held and not needed:
                return False
        stream.queue.popleft()
        if not stream.queue:
            self._busy.pop(stream, None)
        if work.mark is not None:
            work.mark.done, work.mark.at_s = True, time.perf_counter()
        elif work.run is not None and self.error is None:
            self._run(work.run)
        return True

    def _run_held(self) -> None:
        """Its time has come: `until` has run, and nothing after it."""
        for stream in list(self._busy):
            while stream.queue and stream.queue[0].name == self._mood.held and self._step(stream):
                pass

    def _run(self, run: Callable[[], object]) -> None:
        try:
            run()
        except BaseException as error:
            self.error = error

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, nobody else runs anything, and the garbage collector ends nothing that would wait for the device."""
        with self.lock:
            collects = gc.isenabled()
            gc.disable()
            try:
                yield
            finally:
                if collects:
                    gc.enable()
