"""Names what the times of a picture rest on."""

from __future__ import annotations

from enum import StrEnum


class Basis(StrEnum):
    """What times rest on, in words for the page."""

    MEASURED = "measured on this machine"
    ESTIMATED = "estimated from operations and bytes"
    GIVEN = "given by the files of chain and machine"

    @classmethod
    def of(cls, measured: bool) -> Basis:
        """MEASURED or ESTIMATED."""
        return cls.MEASURED if measured else cls.ESTIMATED
