"""Writes and reads `metrics.jsonl`, the events of a run: one JSON object per line, appended without buffering.

The file is only ever appended to, so a follower may keep its place in it. Two things follow:

- A process that dies in mid-line leaves a torn last line. The next writer cuts it off before it appends.
- A run that resumes from step N repeats the steps after N. The repeated lines come after a `start` line with
  `resumed_from: N`, which takes back every `step`, `checkpoint` and `end` line before it with a step above N;
  `read_metrics` gives the series without them.

All that a run needs to go on is also elsewhere, so a line that is no event is skipped (planner/run/events.py).
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from planner.run.events import Event, events_of
from planner.run.folder import RunFolder

log = logging.getLogger(__name__)


class Metrics:
    """Appends events, lines of JSON, to the file metrics.jsonl at `path`. A context manager."""

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def write(self, event: str, *, step: int, **values: str | int | float | Mapping[str, float] | None) -> None:
        """Append one line: the event, its step, the values and the present time. Single numbers that JSON cannot
        express (nan, inf) become null. Raises OSError when the disk does not take the line; then none of it is in the
        file."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        line = json.dumps({"event": event, "time": time.time(), "step": step, **plain}, ensure_ascii=False)
        unwritten = memoryview(f"{line}\n".encode(errors="replace"))
        before = os.fstat(self._file.fileno()).st_size
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError:
            self._file.truncate(before)
            raise

    def close(self) -> None:
        """Flush the file to disk and close it."""
        if not self._file.closed:
            with self._file:
                os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except OSError:
            if error is None:  # else the first error is the one to report
                raise


def read_metrics(path: Path) -> list[Event]:
    """The events in the metrics.jsonl at `path` as one consistent series: without a torn last line, and without steps
    that a resumed run did again. Lines that are no events are skipped. Where a damaged line was the start of a resume,
    the repeated steps reveal it."""
    events: list[Event] = []
    last = 0
    for event in events_of(path.read_bytes().split(b"\n")[:-1] if path.exists() else ()):
        if event["event"] == "start":
            last = event.get("resumed_from") or 0
            events = [e for e in events if e["event"] == "start" or e["step"] <= last]
        elif event["event"] == "step":
            if event["step"] <= last:
                events = [e for e in events if e["event"] == "start" or e["step"] < event["step"]]
            last = event["step"]
        events.append(event)
    return events


def tell_broken_lines(run: RunFolder) -> None:
    """Log a warning about lines in the run's metrics.jsonl that are no events and are skipped. Called once, at the
    start of a run."""
    if broken := run.all_metrics().broken:
        log.warning(
            "%s: line %d is no event%s and passed over: figures, and the choice among evaluations, go by the others",
            run.metrics.name,
            broken[0],
            f", nor are {len(broken) - 1} more," if len(broken) > 1 else ",",
        )


def steps_trained(events: Sequence[Event]) -> int:
    """The number of steps that a run has done according to `events`, the lines of its metrics.jsonl."""
    return max((int(event["step"]) for event in events if event["event"] == "step"), default=0)


def _cut_torn_line(path: Path) -> None:
    """Cut off what follows the last newline: its writer died in the middle of a line."""
    if not path.exists():
        return
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end != len(data):
        os.truncate(path, end)
