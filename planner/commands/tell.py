"""Tells whoever started the planner's process how far it is, before its answer: one JSON object in one line each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from planner.codec import to_json
from planner.reports.receipt import Receipt


class Tell(Protocol):
    """What hears how far an answer is."""

    def doing(self, text: str) -> None:
        """The work that begins now, in a few words: "solving"."""

    def so_far(self, receipt: Receipt) -> None:
        """The receipt as far as it is known: first without what would help, or what would make the job fit; then again
        with each further line of these."""


class _Silent:
    def doing(self, text: str) -> None:
        pass

    def so_far(self, receipt: Receipt) -> None:
        pass


SILENT: Tell = _Silent()
"""Hears nothing."""


class InLines:
    """Writes lines to `stream`: `{"doing": …}` and `{"so_far": …}`, a receipt."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def doing(self, text: str) -> None:
        self._write({"doing": text})

    def so_far(self, receipt: Receipt) -> None:
        self._write({"so_far": to_json(receipt)})

    def _write(self, document: Mapping[str, Any]) -> None:
        print(json.dumps(document), file=self._stream, flush=True)
