"""Defines errors for people: what is wrong, the numbers, what to type next, and a stable code."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from planner.system import IS_LINUX, soft_limit
from planner.units import format_bytes, printable

_UNSEEN = (errno.EDQUOT, errno.EFBIG)
"""Errors of a quota or of the largest file size: the disk has room, but not for this user or this file."""
_FULL = (errno.ENOSPC, *_UNSEEN)
_ID = re.compile(r"(\boffmate [a-z-]+ )ID\b")
_FULL_TEXT = re.compile(rf"\(os error ({'|'.join(map(str, _FULL))})\)|database or disk is full")


class Exit(IntEnum):
    """Exit codes of all commands and processes. STOPPED and NO_ROOM_TO_SAY occur only for processes that the daemon
    starts; the latter means that the disk was too full to write down the error."""

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
    """The first line of an error's text, 300 characters at most; the name of the error's class if it has no text."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def is_disk_full(error: BaseException) -> bool:
    """Whether `error`, or an error that caused it, says that a disk, a quota or the largest size of a file is used up.
    The error may be an OSError, or have the words of SQLite or of libraries in Rust."""
    return any(
        (isinstance(link, OSError) and link.errno in _FULL) or _FULL_TEXT.search(str(link)) for link in _links(error)
    )


def _links(error: BaseException) -> Iterator[BaseException]:
    """The error, then each error that led to it."""
    known: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in known:
        yield link
        known.add(id(link))
        link = link.__cause__ or link.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or an error that caused it, says that the system gave this process no memory, or no thread,
    which needs memory."""
    return any(
        isinstance(link, MemoryError)
        or (isinstance(link, RuntimeError) and "can't start new thread" in str(link))
        or (isinstance(link, OSError) and link.errno == errno.ENOMEM)
        or "NOMEM" in getattr(link, "sqlite_errorname", "")  # SQLite has a code of its own for this on a file
        for link in _links(error)
    )


def out_of_memory(purpose: str) -> UserError:
    """The UserError that the system has no memory; for errors for which `is_out_of_memory` holds. `purpose`: what the
    process needed the memory for."""
    allowed = soft_limit("RLIMIT_AS")
    limited = allowed is not None
    return UserError(
        f"The system has no memory for {purpose}.",
        code="no-memory",
        numbers=(f"ulimit -v allows a process {format_bytes(allowed)}",) if allowed is not None else (),
        hint="ulimit -v unlimited, then offmate down and offmate up" if limited else "end other programs; try again",
    )


def check_linux() -> None:
    """Raise UserError `linux-only` on a system other than Linux."""
    if not IS_LINUX:
        raise UserError(
            "offmate trains on Linux only; on this system it plans for other machines and looks at job files.",
            code="linux-only",
            hint="on Windows use WSL2; here use plan and init with --hardware, preview, import, keys, explain; "
            "in Python offmate.plan with hardware",
            exit_code=Exit.USAGE,
        )


def disk_full(error: BaseException, purpose: str = "what the job writes") -> UserError:
    """The UserError that the disk has no room for `purpose`; for errors for which `is_disk_full` holds."""
    of_user = next((link for link in _links(error) if isinstance(link, OSError) and link.errno in _UNSEEN), None)
    return UserError(
        f"The disk has no room for {purpose}.",
        code="disk-full",
        numbers=(first_line(error),),
        hint="free some space; a job then goes on by itself, from what it saved last",
        needs=Room(str(Path(of_user.filename or ".").parent), 0) if of_user is not None else None,
    )


@dataclass(frozen=True, slots=True)
class Room:
    """Space that is needed on the disk of `folder`: `bytes` free bytes, and `files` more files. Both 0: an unknown
    amount, as when a quota is used up."""

    folder: str
    bytes: int
    files: int = 0

    @property
    def is_unseen(self) -> bool:
        """Whether the amount is unknown, so that the disk's free space does not show whether there is room."""
        return self.bytes == self.files == 0

    def to_json(self) -> dict[str, Any]:
        """This room as a JSON object, which `Room.of` reads."""
        return {"folder": self.folder, "bytes": self.bytes, **({"files": self.files} if self.files else {})}

    @classmethod
    def of(cls, fields: object) -> Room | None:
        """The `Room` that a JSON object from `to_json` describes; None for anything else."""
        entries = fields if isinstance(fields, dict) else {}
        folder, size, files = entries.get("folder"), entries.get("bytes"), entries.get("files", 0)
        if isinstance(folder, str) and isinstance(size, int) and isinstance(files, int):
            return cls(folder, size, files)
        return None


class UserError(Exception):
    """An error that a person can act on.

    what        what is wrong, in a sentence
    code        the kind of error, in a word that stays the same
    numbers     the figures, names and places that belong to it, one text each
    hint        what to type next; "" if nothing is known to help
    exit_code   the exit code of a command that ends with it
    needs       the free space without which the error will happen again, if known
    had_bytes   if some memory was too small, how many bytes it had, if known

    `str()` gives the full text as printed: the sentence, its numbers one per line, the hint, the code. Characters that
    would steer a terminal are replaced: the text may contain names and data.
    """

    def __init__(
        self,
        what: str,
        *,
        code: str,
        numbers: tuple[str, ...] = (),
        hint: str = "",
        exit_code: Exit = Exit.FAILED,
        needs: Room | None = None,
        had_bytes: int | None = None,
    ) -> None:
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
        """This error as a JSON object, which `from_json` reads. It is stored in error.json and in a job's database row,
        and the API answers with it."""
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
        """This error with the job's number in place of `ID` in its hint. The error may have been made before the number
        was known."""
        if not self._has_id():
            return self
        document = self.to_json()
        for fields in (document, *document.get("errors", ())):
            fields["hint"] = _ID.sub(rf"\g<1>{number}", fields["hint"])
        return UserError.from_json(document)

    def _has_id(self) -> bool:
        return _ID.search(self.hint) is not None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> UserError:
        """The error whose `to_json` returned `fields`. Raises KeyError or ValueError for other objects."""
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
    """Several independent errors as one, each with its numbers, hint and code. The code and the exit code of the whole
    are those of the first error."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        lines = []
        for number, error in enumerate(errors, start=1):
            lines += [f"{number}. {error.what}", *(f"   {line}" for line in error.numbers)]
            lines.append(f"   hint: {error.hint}   [{error.code}]" if error.hint else f"   [{error.code}]")
        super().__init__(
            f"{len(errors)} things are wrong with this job.",
            code=errors[0].code,
            numbers=tuple(lines),
            exit_code=errors[0].exit_code,
            hint="correct all of them, then try again",
        )
        self.errors = tuple(errors)

    def _has_id(self) -> bool:
        return any(error._has_id() for error in self.errors)

    def to_json(self) -> dict[str, Any]:
        """This error as a JSON object, like those of other errors, with the objects of the single errors in
        `errors`."""
        return {**super().to_json(), "errors": [error.to_json() for error in self.errors]}


class Errors:
    """Collects the errors of independent checks, in order to report them together."""

    def __init__(self) -> None:
        self.found: list[UserError] = []

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A context for one check: a UserError in it ends the check and is collected; the code after the context goes
        on."""
        try:
            yield
        except SeveralErrors as several:
            self.found += several.errors
        except UserError as error:
            self.found.append(error)

    def told(self) -> UserError:
        """The collected error, or all of them as one `SeveralErrors`. There must be at least one."""
        return self.found[0] if len(self.found) == 1 else SeveralErrors(self.found)

    def refuse(self) -> None:
        """Raise the collected errors, if there are any, as one."""
        if self.found:
            raise self.told()
