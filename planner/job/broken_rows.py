"""Records of training data that are no rows: counted, the first of them kept with place and reason, and by the job's
`broken_rows` left out, or the job is refused. No torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from planner.errors import Exit, UserError, first_line
from planner.job.data_entry import DataEntry
from planner.job.local_data import is_local, local_data

log = logging.getLogger(__name__)

SHOWN = 10


class BrokenRows:
    """The broken records of a job's data: how many, and of the first of them place ("line 3 of a.jsonl") and reason."""

    def __init__(self, *, skip: bool) -> None:
        """`skip`: they are left out; else a job with any is refused."""
        self.skip = skip
        self._count = 0
        self._first: list[tuple[str, UserError]] = []
        self._known: set[object] = set()
        self.met = 0
        """How often one came by: a mixture repeats records."""

    def __len__(self) -> int:
        return self._count

    @property
    def ends(self) -> bool:
        """Whether the job is refused, and nothing is gained by what comes behind."""
        return self._count > 0 and not self.skip

    @property
    def is_full(self) -> bool:
        """Whether the job is refused, and with more of them no more would be shown."""
        return self._count >= SHOWN and not self.skip

    def add(self, place: Callable[[], str], error: ValueError | UserError, record: object = None) -> None:
        """Note a record, and what is wrong with it; its `place` is looked up where it is shown. `record`: what tells it
        from others, where it may come again."""
        self.met += 1
        if record is not None and record in self._known:
            return
        self._known |= set() if record is None else {record}
        self._count += 1
        if len(self._first) < SHOWN:
            self._first.append((place(), error if isinstance(error, UserError) else _broken(str(error))))

    def refuse(self, seen: int) -> None:
        """Raise UserError where the job is refused for one of the `seen` records."""
        if not self.ends:
            return
        (place, first), *others = self._first
        if any(error.code != first.code for _, error in others):
            first = _broken("")
        what, numbers = "Records of the dataset are broken.", (f"{len(self)} of the first {seen} records", *self.lines)
        if not others:
            what, numbers = first.what, self.lines if first.code == _CODE else (place, *first.numbers)
        hint = f"{first.hint}; broken_rows: skip leaves such records out"
        raise UserError(what, code=first.code, exit_code=Exit.USAGE, numbers=numbers, hint=hint)

    def say(self) -> None:
        """Tell how many are left out, and the first of them."""
        if self._count and self.skip:
            records = "1 record is" if len(self) == 1 else f"{len(self)} records are"
            log.warning("data: %s broken and left out (broken_rows: skip)", records)
            for line in self.lines:
                log.warning("data: left out: %s", line)

    @property
    def lines(self) -> tuple[str, ...]:
        """The first of them, in words."""
        found = tuple(f"{place}: {_reason(error)}" for place, error in self._first)
        return (*found, f"and {len(self) - SHOWN} more") if len(self) > SHOWN else found


def place_of(entry: DataEntry, number: int, name: str) -> str:
    """Where an entry's record `number` (from 1) is: its line in a jsonl file, else its number."""
    if is_local(entry.path) and entry.whole:
        files = local_data(Path(entry.path)).files
        left = number
        for file in files if all(file.suffix.lower() == ".jsonl" for file in files) else ():
            for at, _, wrong in json_lines(file):
                left -= wrong is None
                if not left:
                    return f"line {at} of {file.name}"
    return f"record {number} of {name}"


def json_lines(file: Path) -> Iterator[tuple[int, bytes, ValueError | None]]:
    """The lines of a jsonl file that are not blank, by their number from 1, each with what is wrong with it."""
    with file.open("rb") as lines:
        for at, line in enumerate(lines, start=1):
            if line.strip():
                yield at, line, _wrong_with(line)


def _wrong_with(line: bytes) -> ValueError | None:
    try:
        record = json.loads(line.removeprefix(b"\xef\xbb\xbf").strip())
    except ValueError as error:
        return ValueError(f"it is no JSON: {first_line(error)}")
    return None if isinstance(record, dict | None) else ValueError(f"it is no object: {str(record)[:80]}")


_CODE = "broken-record"


def _broken(reason: str) -> UserError:
    what = "A record of the dataset is broken."
    return UserError(what, code=_CODE, exit_code=Exit.USAGE, numbers=(reason,), hint="correct it, or take it out")


def _reason(error: UserError) -> str:
    if error.code == _CODE:
        return error.numbers[0]
    return f"{error.what.rstrip('.')} ({error.numbers[0]})" if error.numbers else error.what
