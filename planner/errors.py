"""What people are told when something is wrong: what, the numbers, what to type next, a stable code."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class Exit(IntEnum):
    """Exit codes of every command and process."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    NO_SUCH_JOB = 4
    DAEMON_NOT_RUNNING = 69
    STOPPED = 75
    INTERRUPTED = 130


def first_line(error: BaseException) -> str:
    """What another library's error says, in one line that is not too long; its name when it says nothing."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


class UserError(Exception):
    """An error a person can act on.

    `str()` gives the full text as printed: the sentence, its numbers one per line, the hint, the code.
    """

    def __init__(
        self, what: str, *, code: str, numbers: tuple[str, ...] = (), hint: str = "", exit_code: Exit = Exit.FAILED
    ) -> None:
        self.what = what
        self.code = code
        self.numbers = numbers
        self.hint = hint
        self.exit_code = exit_code
        lines = [what, *(f"  {number}" for number in numbers)]
        lines.append(f"  hint: {hint}   [{code}]" if hint else f"  [{code}]")
        super().__init__("\n".join(lines))

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads: the object of error.json, of the API's refusals, and of a job's row."""
        return {
            "what": self.what,
            "numbers": list(self.numbers),
            "hint": self.hint,
            "code": self.code,
            "exit_code": int(self.exit_code),
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> UserError:
        """The error that `to_json` gave `fields` of. Raises KeyError or ValueError for other objects."""
        return cls(
            fields["what"],
            code=fields["code"],
            numbers=tuple(fields["numbers"]),
            hint=fields["hint"],
            exit_code=Exit(fields["exit_code"]),
        )
