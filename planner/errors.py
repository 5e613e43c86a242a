"""What people are told when something is wrong: what, the numbers, what to type next, a stable code."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from planner.units import format_bytes, printable

_UNSEEN = (errno.EDQUOT, errno.EFBIG)
"""Quotas and the largest size of a file: the disk has room, and does not say how much of it is for this user."""
_FULL = (errno.ENOSPC, *_UNSEEN)
_ID = re.compile(r"(\boffmate [a-z-]+ )ID\b")
_FULL_TEXT = re.compile(rf"\(os error ({'|'.join(map(str, _FULL))})\)|database or disk is full")


class Exit(IntEnum):
    """Exit codes of every command and process. Two are of processes only: STOPPED, and NO_ROOM_TO_SAY of one whose disk
    is so full that it could not write down its error."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    NO_SUCH_JOB = 4
    DAEMON_NOT_RUNNING = 69
    NO_ROOM_TO_SAY = 74
    STOPPED = 75
    INTERRUPTED = 130


def first_line(error: BaseException) -> str:
    """What another library's error says, in one line that is not too long; its name when it says nothing."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def is_disk_full(error: BaseException) -> bool:
    """Whether the error, or one that led to it, says that a disk, a quota or the largest size of a file is used up:
    one of the system, or in the words of SQLite and of libraries in Rust."""
    return any(
        (isinstance(link, OSError) and link.errno in _FULL) or _FULL_TEXT.search(str(link)) for link in _links(error)
    )


def _links(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    known: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in known:
        yield link
        known.add(id(link))
        link = link.__cause__ or link.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the system gave this process no memory, or no thread, which needs some: the error itself, or one that led
    to it."""
    return any(
        isinstance(link, MemoryError)
        or (isinstance(link, RuntimeError) and "can't start new thread" in str(link))
        or (isinstance(link, OSError) and link.errno == errno.ENOMEM)
        or "NOMEM" in getattr(link, "sqlite_errorname", "")  # SQLite names one of its own for a file
        for link in _links(error)
    )


def out_of_memory(what: str) -> UserError:
    """The error for people when `is_out_of_memory(error)`: `what` the process could not do."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    limited = allowed != resource.RLIM_INFINITY
    return UserError(
        f"The system has no memory for {what}.", code="no-memory",
        numbers=(f"ulimit -v allows a process {format_bytes(allowed)}",) if limited else (),
        hint="ulimit -v unlimited, then offmate down and offmate up" if limited else "end other programs; try again",
    )  # fmt: skip


def disk_full(error: BaseException, what: str = "what the job writes") -> UserError:
    """The error for people when `is_disk_full(error)`: there was no room for `what`."""
    of_user = next((link for link in _links(error) if isinstance(link, OSError) and link.errno in _UNSEEN), None)
    return UserError(
        f"The disk has no room for {what}.", code="disk-full", numbers=(first_line(error),),
        hint="free some space; a job then goes on by itself, from what it saved last",
        needs=Room(str(Path(of_user.filename or ".").parent), 0) if of_user is not None else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Room:
    """So many free bytes, and so many more files, on the disk of `folder`. Neither: some, and nobody knows how much, as
    where a quota ran out."""

    folder: str
    bytes: int
    files: int = 0

    @property
    def is_unseen(self) -> bool:
        """Whether the disk does not show when it is there."""
        return self.bytes == self.files == 0

    def to_json(self) -> dict[str, Any]:
        """What `of` reads."""
        return {"folder": self.folder, "bytes": self.bytes, **({"files": self.files} if self.files else {})}

    @classmethod
    def of(cls, fields: object) -> Room | None:
        """What `to_json` wrote; None for anything else."""
        found = fields if isinstance(fields, dict) else {}
        folder, size, files = found.get("folder"), found.get("bytes"), found.get("files", 0)
        if isinstance(folder, str) and isinstance(size, int) and isinstance(files, int):
            return cls(folder, size, files)
        return None


class UserError(Exception):
    """An error a person can act on. Where they are known: `needs`, the free space without which it comes again;
    `had_bytes`, how much there was of the memory that was too little.

    `str()` gives the full text as printed: the sentence, its numbers one per line, the hint, the code. What would steer
    a terminal is taken out: names and texts of data may stand in it.
    """

    def __init__(
        self, what: str, *, code: str, numbers: tuple[str, ...] = (), hint: str = "", exit_code: Exit = Exit.FAILED,
        needs: Room | None = None, had_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.what = printable(what)
        self.code = code
        self.numbers = tuple(map(printable, numbers))
        self.hint = printable(hint)
        self.exit_code = exit_code
        self.needs = needs
        self.had_bytes = had_bytes
        lines = [self.what, *(f"  {number}" for number in self.numbers)]
        lines.append(f"  hint: {self.hint}   [{code}]" if hint else f"  [{code}]")
        super().__init__("\n".join(lines))

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads: the object of error.json, of the API's refusals, and of a job's row."""
        return {
            "what": self.what,
            "numbers": list(self.numbers),
            "hint": self.hint,
            "code": self.code,
            "exit_code": int(self.exit_code),
            **({"needs": self.needs.to_json()} if self.needs is not None else {}),
            **({"had_bytes": self.had_bytes} if self.had_bytes is not None else {}),
        }

    def of_job(self, number: str | int) -> UserError:
        """This error with the job's number in its hint, where that has `ID` in a command as it was not known there."""
        if not self._has_id():
            return self
        told = self.to_json()
        for fields in (told, *told.get("errors", ())):
            fields["hint"] = _ID.sub(rf"\g<1>{number}", fields["hint"])
        return UserError.from_json(told)

    def _has_id(self) -> bool:
        return _ID.search(self.hint) is not None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> UserError:
        """The error that `to_json` gave `fields` of. Raises KeyError or ValueError for other objects."""
        if several := fields.get("errors"):
            return SeveralErrors([cls.from_json(each) for each in several])
        return UserError(
            fields["what"],
            code=fields["code"],
            numbers=tuple(fields["numbers"]),
            hint=fields["hint"],
            exit_code=Exit(fields["exit_code"]),
            needs=Room.of(fields.get("needs")),
            had_bytes=fields.get("had_bytes"),
        )


class SeveralErrors(UserError):
    """Errors that were found apart and are told together, each with its numbers, hint and code. The code and the exit
    code of all are the first's."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        lines = []
        for number, error in enumerate(errors, start=1):
            lines += [f"{number}. {error.what}", *(f"   {line}" for line in error.numbers)]
            lines.append(f"   hint: {error.hint}   [{error.code}]" if error.hint else f"   [{error.code}]")
        super().__init__(
            f"{len(errors)} things are wrong with this job.", code=errors[0].code, numbers=tuple(lines),
            exit_code=errors[0].exit_code, hint="correct all of them, then try again",
        )  # fmt: skip
        self.errors = tuple(errors)

    def _has_id(self) -> bool:
        return any(error._has_id() for error in self.errors)

    def to_json(self) -> dict[str, Any]:
        """As of other errors, with `errors`: those of each."""
        return {**super().to_json(), "errors": [error.to_json() for error in self.errors]}


class Errors:
    """What checks that do not depend on each other have found, to be told together."""

    def __init__(self) -> None:
        self.found: list[UserError] = []

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keeps the UserError that is raised inside, and goes on behind."""
        try:
            yield
        except SeveralErrors as several:
            self.found += several.errors
        except UserError as error:
            self.found.append(error)

    def told(self) -> UserError:
        """What was found, of which there is something: one error, or all of them as one."""
        return self.found[0] if len(self.found) == 1 else SeveralErrors(self.found)

    def refuse(self) -> None:
        """Raise what was found, if anything was."""
        if self.found:
            raise self.told()
