"""Records of training data that are no rows: counted, the first of them kept with place and reason, and by the job's
`broken_rows` left out, or the job is refused. No torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from planner.errors import Exit, UserError, first_line
from planner.job.data_entry import DataEntry
from planner.job.local_data import is_local, local_data

log = logging.getLogger(__name__)

SHOWN = 10


class BrokenRows:
    """The broken records of a job's data, each once by its place ("line 3 of a.jsonl")."""

    def __init__(self, *, skip: bool) -> None:
        """`skip`: they are left out; else a job with any is refused."""
        self.skip = skip
        self._found: dict[str, UserError | None] = {}
        self.met = 0
        """How often one came by: a mixture repeats records."""

    def __len__(self) -> int:
        return len(self._found)

    @property
    def ends(self) -> bool:
        """Whether the job is refused, and nothing is gained by what comes behind."""
        return bool(self._found) and not self.skip

    @property
    def is_full(self) -> bool:
        """Whether the job is refused, and with more of them no more would be shown."""
        return len(self._found) >= SHOWN and not self.skip

    def add(self, place: str, error: ValueError | UserError) -> None:
        """Note a record, and what is wrong with it."""
        self.met += 1
        told = error if isinstance(error, UserError) else _broken(str(error))
        self._found.setdefault(place, told if len(self._found) < SHOWN else None)

    def refuse(self, seen: int) -> None:
        """Raise UserError where the job is refused for one of the `seen` records."""
        if not self.ends:
            return
        kept = [error for error in self._found.values() if error is not None]
        first = kept[0] if len({error.code for error in kept}) == 1 else _broken("")
        what, numbers = "Records of the dataset are broken.", (f"{len(self)} of the first {seen} records", *self.lines)
        if len(self) == 1:
            told = self.lines if first.code == _CODE else (*self._found, *first.numbers)
            what, numbers = first.what, told
        hint = f"{first.hint}; broken_rows: skip leaves such records out"
        raise UserError(what, code=first.code, exit_code=Exit.USAGE, numbers=numbers, hint=hint)

    def say(self) -> None:
        """Tell how many are left out, and the first of them."""
        if self._found and self.skip:
            records = "1 record is" if len(self) == 1 else f"{len(self)} records are"
            log.warning("data: %s broken and left out (broken_rows: skip)", records)
            for line in self.lines:
                log.warning("data: left out: %s", line)

    @property
    def lines(self) -> tuple[str, ...]:
        """The first of them, in words."""
        found = tuple(f"{place}: {_reason(error)}" for place, error in self._found.items() if error is not None)
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
        record = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
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
