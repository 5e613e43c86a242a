"""Says where the times in a drawing of a plan come from."""

from __future__ import annotations

from enum import StrEnum


class Basis(StrEnum):
    """Where the times come from, in words for the page."""

    MEASURED = "measured on this machine"
    ESTIMATED = "estimated from operations and bytes"
    GIVEN = "given by the files of chain and machine"

    @classmethod
    def of(cls, measured: bool) -> Basis:
        """MEASURED if the times were measured, else ESTIMATED."""
        return cls.MEASURED if measured else cls.ESTIMATED
