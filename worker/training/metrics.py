"""`metrics.jsonl`: what happened, one JSON object per line, appended by the trainer and flushed line by line.

The file is only ever appended to, so a follower may keep its place in it. Two things follow:

- A process that dies in mid-line leaves a torn last line. The next writer cuts it off before it appends.
- A run that resumes from step N repeats the steps after N. The repeated lines come after a `start` line with
  `resumed_from: N`, which takes back every `step`, `checkpoint` and `end` line before it with a step above N;
  `read_metrics` gives the series without them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

Event = dict[str, str | int | float | None]


class Metrics:
    """Appends events to the file `path`; a context manager."""

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def write(self, event: str, *, step: int, **values: str | int | float | None) -> None:
        """Append one line with the time of now. Numbers that JSON has no form for (nan, inf) become null. Raises
        OSError, with nothing of the line in the file, when the disk does not take it."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        line = json.dumps({"event": event, "time": time.time(), "step": step, **plain}, ensure_ascii=False)
        rest = memoryview(f"{line}\n".encode(errors="replace"))
        before = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(before)
            raise

    def close(self) -> None:
        """Flush to disk and close."""
        if not self._file.closed:
            with self._file:
                os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except OSError:
            if error is None:  # else that is what people should know of
                raise


def read_metrics(path: Path) -> list[Event]:
    """The events of a run as one consistent series: without a torn last line, without what a resume took back.

    Raises ValueError naming the line when a complete line is not a JSON object.
    """
    events: list[Event] = []
    for event in _lines(path):
        if event["event"] == "start":
            since = event.get("resumed_from")
            last = since if isinstance(since, int) else 0
            events = [e for e in events if e["event"] == "start" or _step(e) <= last]
        events.append(event)
    return events


def _step(event: Event) -> int:
    step = event["step"]
    assert isinstance(step, int)
    return step


def _lines(path: Path) -> Iterator[Event]:
    if not path.exists():
        return
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n") if whole else (), start=1):
        try:
            event = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON: {error}") from None
        if not isinstance(event, dict) or "event" not in event or not isinstance(event.get("step"), int):
            raise ValueError(f"{path} line {number} has no event and step")
        yield event


def steps_trained(events: Sequence[Event]) -> int:
    """The steps that a run has done, by what it has written down."""
    return max((int(event["step"] or 0) for event in events if event["event"] == "step"), default=0)


def _cut_torn_line(path: Path) -> None:
    """Cut what follows the last newline: the writer died in the middle of it."""
    if not path.exists():
        return
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end != len(data):
        os.truncate(path, end)
