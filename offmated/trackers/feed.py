"""Sends one tracker the figures of one run. `python -m offmated.trackers.feed` reads one line of JSON from stdin, which
names the run and the tracker, follows metrics.jsonl, and ends when stdin is closed and all is sent. Exit code 0: all is
sent; 2: trying again makes no sense; any other: it makes sense."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offmated.trackers.sinks import Point, Sink, Target, open_sink, points, quiet
from planner.codec import json_object
from planner.errors import Exit, UserError
from planner.keys.source import read_text, read_yaml
from planner.run.folder import RunFolder
from planner.run.processes import die_with

EVERY_S = 2.0
OVER = b"!"
NICE = 10


@dataclass(frozen=True, slots=True)
class Told:
    """A note, kept in a file, of how much of a run was sent to a tracker. `step`: all steps below it are sent, the step
    itself perhaps only in part. `position`: the byte of metrics.jsonl from which to read on, before anything of that
    step. `whole`: the end of the file's last line, if all was sent; else None."""

    step: int
    position: int
    whole: int | None = None

    @classmethod
    def read(cls, run: RunFolder, tracker: str) -> Told | None:
        """Read the note for `tracker` in the run's folder; None if there is none yet. If the note is damaged it is not
        known how much was sent: all is sent again, and the tracker itself leaves out what it has."""
        try:
            told = cls(**(json_object(note_of(run, tracker).read_bytes()) or {}))
        except FileNotFoundError:
            return None
        except (OSError, TypeError):
            return cls(0, 0)
        places = (told.step, told.position, 0 if told.whole is None else told.whole)
        return told if all(isinstance(place, int) and place >= 0 for place in places) else cls(0, 0)

    def write(self, run: RunFolder, tracker: str) -> None:
        """Write the note for `tracker` into the run's folder. A reader finds the whole old note or the whole new
        one."""
        note = note_of(run, tracker)
        beside = note.with_suffix(".new")
        with beside.open("w") as file:
            file.write(json.dumps({"step": self.step, "position": self.position, "whole": self.whole}))
            file.flush()
            os.fsync(file.fileno())  # or a power cut may leave an empty file under this name
        beside.replace(note)


def note_of(run: RunFolder, tracker: str) -> Path:
    """The path of the file that notes how much of the run was sent to `tracker`."""
    return run.path / "trackers" / f"{tracker}.json"


def is_told(run: RunFolder, tracker: str) -> bool:
    """Whether a tracker has been sent all figures of the run, so that nothing is left to send unless the run goes
    on."""
    end = run.metrics_end()  # not the file's size: a last line that a full disk cut short is never told
    told = Told.read(run, tracker)
    return end == 0 or (told is not None and told.whole == end)


def follow(
    run: RunFolder,
    tracker: str,
    open_to: Callable[[int | None], Sink],
    closing: Callable[[float], bool],
    over: Callable[[], bool] = lambda: False,
) -> None:
    """Send all figures of a run to a tracker, until `closing(seconds)`, which waits at most that long, says that
    nothing more comes for now. `over`: whether the job has ended by then. `open_to`: opens the tracker, given the step
    below which all was sent, or None. A tracker that keeps one row a step gets the newest step only when the next one
    has begun or the job has ended: an evaluation that a pause cuts short is made after the pause, and belongs to the
    step before it."""
    before = Told.read(run, tracker)
    told = before or Told(0, 0)
    told.write(run, tracker)  # so that the next process knows that something may have been told
    sink = open_to(None if before is None else before.step)
    status: str | None = None
    newest: dict[str, int] = {}
    held: list[Point] = []
    sure: deque[tuple[float, Told]] = deque()
    noted, position, ending = told, told.position, False
    while True:
        piece = run.metrics_after(position)
        events, after = piece.events, piece.position
        new: list[Point] = []
        for kind, point in points(events):
            if point.step >= told.step and point.step > newest.get(kind, -1):
                newest[kind] = point.step
                new.append(point)
        for event in events:
            status = {"start": None, "end": event.get("status")}.get(event["event"], status)
        if new:
            last = max(newest.values())
            ready = sorted((*held, *new), key=lambda point: point.step)
            held = [point for point in ready if point.step == last] if sink.row_a_step else []
            sink.tell(ready[: len(ready) - len(held)])
            if last > noted.step or noted is told:
                noted = Told(last, position)  # more of this step may follow: the next process reads it again
            sure.append((time.monotonic() + sink.unsure_s, noted))
        while sure and sure[0][0] <= time.monotonic():
            sure.popleft()[1].write(run, tracker)
        if after == position and ending:
            break
        if after == position:
            ending = closing(EVERY_S)
        position = after
    if held and (over() or status not in (None, "stopped")):
        sink.tell(held)
        held = []
    sink.close(status)
    whole = position == run.metrics_end() and not held
    Told(noted.step, noted.position, position if whole else None).write(run, tracker)


def without_secrets(text: str) -> str:
    """`text` in a form that may be shown: one line, without the user and password of an address, and without the values
    of environment variables that look like keys."""
    line = " ".join(text.split())[:300]
    line = re.sub(r"://[^/\s@]+@", "://…@", line)
    for name, value in os.environ.items():
        if len(value) >= 8 and re.search("KEY|TOKEN|PASSWORD|SECRET", name):
            line = line.replace(value, "…")
    return line


@contextmanager
def _alone(run: RunFolder, tracker: str) -> Iterator[None]:
    """A context that holds a lock, because the process of an earlier daemon may still be sending figures to the same
    tracker."""
    with note_of(run, tracker).with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Asking:
    """What the daemon says through stdin: it closes it when nothing more comes for now, and sends `OVER` before that
    where the job has ended."""

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor, self._said = descriptor, b""

    def closed(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        received = os.read(self._descriptor, 1) if ready else b"."
        self._said += received if ready else b""
        return received == b""

    def over(self) -> bool:
        return OVER in self._said


def main() -> int:
    """Send the figures of the run to the tracker that stdin names. Returns the exit code."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return Exit.USAGE
        line += byte
    request: dict[str, Any] = json.loads(line)
    tracker, run = str(request["tracker"]), RunFolder(Path(request["run"]))
    die_with(request["daemon"])  # a tracker may wait for its network for ever, and would keep the next process out
    os.nice(NICE)
    quiet()
    try:
        note_of(run, tracker).parent.mkdir(mode=0o700, exist_ok=True)
        with _alone(run, tracker):
            keys = read_yaml(read_text(run.resolved, longest=None), run.resolved.name, longest=None).values

            def open_to(told: int | None) -> Sink:
                return open_sink(
                    tracker,
                    Target(name=request["name"], keys=keys, run=run, state=Path(request["state"]), told=told),
                )

            asking = _Asking()
            follow(run, tracker, open_to, asking.closed, asking.over)
    except UserError as error:
        text = " ".join((error.what, *error.numbers, error.hint))
        sys.stderr.write(f"{text}\n")
        run.say(f"{tracker}: {text}")
        return int(Exit.USAGE)
    except Exception as error:  # an error of a tracker ends only its own process
        reason = without_secrets(f"{type(error).__name__}: {error}")
        sys.stderr.write(f"{reason}\n")
        if request["first"]:
            run.say(f"{tracker} was not told, and is tried again: {reason}")
        return int(Exit.FAILED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
