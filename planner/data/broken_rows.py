"""Collects the broken records of a dataset and reports them. They are counted, and for each kind of mistake the first
record is kept with its place and the reason. The job's `broken_rows` says whether they are left out (`skip`) or the job
is refused (`refuse`). Does not import torch."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from planner.data.json_rows import Row
from planner.errors import Exit, UserError
from planner.units import counted

log = logging.getLogger(__name__)

SHOWN = 10
"""The most kinds of mistakes that are reported."""
ENOUGH = 1000
"""The number of broken records after which a job that will be refused reads no further."""
_OF_ONE_RECORD = re.compile(r"(?<=this is ).*|(?<=no JSON object: ).*|(?<=turn: ).*|\d+", re.DOTALL)
"""The parts of an error text that belong to one record: its value, and positions in it. Two errors that differ only in
these are the same kind of mistake."""


class BrokenRecordsError(UserError):
    """The error that refuses a job because records of its dataset are broken."""


@dataclass(slots=True)
class _Mistake:
    """One kind of mistake: the place of the first record with it, that record's error, a line with both, and the number
    of records with this mistake."""

    place: str
    error: UserError
    line: str
    count: int = 1

    def __str__(self) -> str:
        return self.line if self.count == 1 else f"{self.line} (the first of {self.count} such records)"


class BrokenRows:
    """The broken records of a job's dataset: their number and, for each kind of mistake, the number of records with it
    and the place ("line 3 of a.jsonl") and reason of the first one."""

    def __init__(self, *, skip: bool) -> None:
        """`skip`: broken records are left out; without it a job that has any is refused."""
        self.skip = skip
        self._count = 0
        self._mistakes: dict[tuple[str, str], _Mistake] = {}
        self._lacking: dict[str, _Mistake] = {}
        self._known: set[object] = set()
        self.met = 0
        """How often a broken record was read. A mixture of datasets reads the same record several times."""
        self.unread = 0
        """The number of rows that are no records, such as lines that are not JSON."""
        self.rendered = 0
        """The number of records that were turned into texts to train on, or failed there."""

    def __len__(self) -> int:
        return self._count

    @property
    def ends(self) -> bool:
        """Whether the job is refused: it has broken records and does not skip them."""
        return self._count > 0 and not self.skip

    @property
    def is_full(self) -> bool:
        """Whether the job is refused and so many mistakes are known already that reading on would add nothing to the
        error."""
        return not self.skip and (self._count >= ENOUGH or len(self._mistakes) >= SHOWN)

    def add(self, place: str, error: ValueError | UserError, record: object = None) -> None:
        """Note a broken record and its error. `place`: where it is, such as "line 3 of a.jsonl". `record`: a hashable
        value that identifies a record which may be read again, so that it is counted once."""
        user_error = error if isinstance(error, UserError) else _broken(str(error))
        self._add(place, user_error, f"{place}: {_reason(user_error)}", record)

    def add_row(self, row: Row) -> None:
        """Note a row that is no record, such as a line that is not JSON."""
        self._add(row.place, _unreadable(row), f"{row.place} {row.wrong}", None)
        self.unread += 1

    def add_lacking(self, place: str, lacks: str) -> None:
        """Note a record at `place` that counts as empty because it lacks columns (`lacks`, in words). The error lists
        it only where the job is refused for other records."""
        if (known := self._lacking.get(lacks)) is not None:
            known.count += 1
        elif len(self._lacking) < SHOWN:
            self._lacking[lacks] = _Mistake(place, _broken(lacks), f"{place} {lacks}, and counts as empty")

    def _add(self, place: str, error: UserError, line: str, record: object) -> None:
        self.met += 1
        if record is not None and record in self._known:
            return
        self._known |= set() if record is None else {record}
        self._count += 1
        kind = (error.code, _OF_ONE_RECORD.sub("", line.removeprefix(place)))
        if (known := self._mistakes.get(kind)) is not None:
            known.count += 1
        elif len(self._mistakes) < SHOWN:
            self._mistakes[kind] = _Mistake(place, error, line)

    def refuse(self, seen: int) -> None:
        """Raise BrokenRecordsError if broken records were found and the job does not skip them; else do nothing.
        `seen`: the number of records read so far, for the error."""
        if not self.ends:
            return
        self._refuse_template()
        first, *others = self._mistakes.values()
        all_hints = dict.fromkeys(each.error.hint for each in self._mistakes.values())
        hints = [hint for hint in all_hints if not any(other != hint and other.startswith(hint) for other in all_hints)]
        code = first.error.code if all(each.error.code == first.error.code for each in others) else _CODE
        what, numbers = "Records of the dataset are broken.", (f"{len(self)} of the first {seen} records", *self.lines)
        if len(self) == 1:
            what = first.error.what
            numbers = (first.line,) if code in _TOLD_BY_LINE else (first.place, *first.error.numbers)
        numbers += tuple(map(str, self._lacking.values()))
        hint = f"{'; or '.join(hints)}; broken_rows: skip leaves such records out"
        raise BrokenRecordsError(what, code=code, exit_code=Exit.USAGE, numbers=numbers, hint=hint)

    def _refuse_template(self) -> None:
        """Raise BrokenRecordsError if the chat template refused every record that it was given, more than one, all for
        the same reason: then the template is wrong and not the records."""
        only = [*self._mistakes.values()]
        if len(only) == 1 and only[0].error.code == _REFUSES and only[0].count == self.rendered > 1:
            reason, _, origin = only[0].error.numbers
            raise BrokenRecordsError(
                "The chat template refuses every conversation.",
                code=_REFUSES,
                exit_code=Exit.USAGE,
                numbers=(f"all {self.rendered} that it was given: {reason}", origin, f"the first: {only[0].place}"),
                hint="correct the template; or give another chat_template, or data as this one wants them",
            )

    def end(self, documents: int, seen: int) -> None:
        """Refuse the job, or log which records are left out, after the whole dataset is read.

        `documents`: how many records became texts to train on; `seen`: how many records were read. Raises
        BrokenRecordsError where the job is refused, UserError where no record is left to train on.
        """
        self.refuse(seen)
        self.say()
        if self._count and not documents:
            self._refuse_template()
            raise UserError(
                "All records of the dataset are broken or empty.",
                code="nothing-to-train",
                exit_code=Exit.USAGE,
                numbers=(f"{self._count} of {seen} are broken", *self.lines),
                hint="correct them, or give other data",
            )

    def say(self, among: str = "") -> None:
        """Log how many records are left out, and the first record of each kind of mistake. `among`: text before the
        number that says which records are meant."""
        if self._count and self.skip:
            records = f"{counted(len(self), 'record')} {'is' if len(self) == 1 else 'are'}"
            log.warning("data: %s%s broken and left out (broken_rows: skip)", among, records)
            for line in self.lines:
                log.warning("data: left out: %s", line)

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each kind of mistake; a last line counts the records with other mistakes, if there are any."""
        more = len(self) - sum(each.count for each in self._mistakes.values())
        texts = tuple(map(str, self._mistakes.values()))
        return (*texts, f"and {counted(more, 'record')} with other mistakes") if more else texts


def no_records(name: object, *, left_out: int) -> UserError:
    """Return the error for a dataset without a single record. `left_out`: how many broken records were left out of
    it."""
    more = (f"{left_out} broken and left out (broken_rows: skip)",) if left_out else ()
    return UserError(
        f"The dataset {name} is empty.",
        code="empty-dataset",
        exit_code=Exit.USAGE,
        numbers=("0 records", *more),
        hint="give a file with at least one record",
    )


_CODE = "broken-record"
_REFUSES = "chat-template-refuses"
_TOLD_BY_LINE = (_CODE, "dataset-unreadable")


def _broken(reason: str) -> UserError:
    what = "A record of the dataset is broken."
    return UserError(what, code=_CODE, exit_code=Exit.USAGE, numbers=(reason,), hint="correct it, or take it out")


def _unreadable(row: Row) -> UserError:
    return UserError(
        "A record of the dataset cannot be read.",
        code="dataset-unreadable",
        exit_code=Exit.USAGE,
        numbers=(f"{row.place} {row.wrong}",),
        hint="correct it, or take it out" + "; in .jsonl a line is one JSON object" * row.place.endswith(".jsonl"),
    )


def _reason(error: UserError) -> str:
    if error.code == _CODE:
        return error.numbers[0]
    return f"{error.what.rstrip('.')} ({error.numbers[0]})" if error.numbers else error.what
