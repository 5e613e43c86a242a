"""Shows how far the planner's process is, and its answer as it grows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from offmated.cli import job_view, receipt_view
from offmated.cli.output import console, print_json
from offmated.cli.several_view import several
from planner.codec import from_json
from planner.reports.receipt import Receipt


class Quiet:
    """Prints the answer alone, as JSON."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def news(self, document: Mapping[str, Any]) -> None:
        """Ignore how far the planner is."""

    def answer(self, document: dict[str, Any]) -> None:
        """Print the answer."""
        print_json(document)

    def answers(self, documents: list[dict[str, Any]], *, frontier: bool) -> None:
        """Print the answers to a question about several machines."""
        print_json(documents)


class Screen:
    """Prints a receipt's figures as soon as they are there, and what would help below them, as it comes. On a terminal
    the last line says what is being done. What was printed stays when the user ends the command."""

    def __init__(self) -> None:
        self._console = console()
        self._doing = "reading the job"
        self._helps: RenderableType | None = None
        self._has_figures = False
        self._live: Live | None = None

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def news(self, document: Mapping[str, Any]) -> None:
        """Show what the planner does, or its receipt so far."""
        if "doing" in document:
            self._doing = document["doing"]
        if "so_far" in document:
            found = from_json(Receipt, document["so_far"])
            if self._has_figures:
                self._helps = receipt_view.changes(found)
            else:
                self._print(receipt_view.figures(found))
                self._has_figures = True
        if self._live is not None:
            self._live.update(self._moving())

    def answer(self, document: dict[str, Any]) -> None:
        """Print the answer, or what of it is not on the screen yet."""
        self._helps = None
        self._end()
        if self._has_figures:
            shown: RenderableType | None = receipt_view.changes(from_json(Receipt, document))
        elif "plan" in document:
            shown = job_view.plan(document)
        else:
            shown = receipt_view.answer(document)
        if shown is not None:
            self._console.print(shown)

    def answers(self, documents: list[dict[str, Any]], *, frontier: bool) -> None:
        """Print the answers to a question about several machines, or with `frontier` about several amounts of GPU
        memory."""
        self._end()
        self._console.print(several(documents, frontier=frontier))

    def _moving(self) -> RenderableType:
        working = Spinner("dots", Text(self._doing))
        return working if self._helps is None else Group(self._helps, working)

    def _print(self, shown: RenderableType) -> None:
        self._end()
        self._console.print(shown)
        if self._console.is_terminal:
            self._begin()

    def _begin(self) -> None:
        # Errors of the planner's process appear above the moving lines.
        errors = sys.stderr.isatty()
        self._live = Live(self._moving(), console=self._console, redirect_stdout=False, redirect_stderr=errors)
        self._live.start()

    def _end(self) -> None:
        """End the moving lines: the one that says what is being done goes, what would help stays."""
        if self._live is not None:
            live, self._live = self._live, None
            live.update(self._helps if self._helps is not None else Text(), refresh=True)
            live.transient = self._helps is None
            live.stop()
