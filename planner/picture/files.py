"""Writes a plan as a timeline and as an HTML page, if the command line asks for them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.codec import from_json
from planner.errors import Exit, UserError
from planner.machine.hardware import Hardware
from planner.picture.basis import Basis
from planner.reports.receipt import Receipt
from planner.schedule.chain import Chain
from planner.schedule.earlier import chain_of, plan_of
from planner.schedule.measured import TIMELINE, Measured
from planner.schedule.plan import Plan


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options --trace (timeline) and --html (page) to `parser`."""
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the timeline for Perfetto")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """The files to write a plan's timeline (`trace`) and its HTML page (`html`) to; None: it is not written."""

    trace: Path | None = None
    html: Path | None = None

    @classmethod
    def wanted(cls, options: argparse.Namespace) -> Pictures:
        """The files that the command line's `options` name. Raises UserError (exit 2) for a folder that does not
        exist, before any planning."""
        for path in (options.trace, options.html):
            if path is not None and not path.absolute().parent.is_dir():
                raise _cannot_write(path, "there is no such folder")
        return cls(trace=options.trace, html=options.html)

    def write(
        self,
        plan: Plan,
        chain: Chain,
        hardware: Hardware,
        *,
        title: str,
        basis: Basis = Basis.ESTIMATED,
        measured: Measured | None = None,
    ) -> None:
        """Write the plan's timeline and page to these files. `measured`: times of a real run to show beside the
        planned ones. Raises UserError (exit 2) for a file that cannot be written."""
        if self.trace is None and self.html is None:
            return
        from planner.picture.drawing import draw
        from planner.picture.page import page
        from planner.picture.trace import trace

        drawing = draw(plan, chain, hardware, title=title, basis=basis, measured=measured)
        if self.trace is not None:
            _write(self.trace, json.dumps(trace(drawing), separators=(",", ":")) + "\n")
        if self.html is not None:
            _write(self.html, page(drawing))

    def write_frontier(self, receipts: Sequence[Receipt], *, title: str) -> None:
        """Write the page with the seconds of a step over GPU memory. `receipts`: those of one job with several budgets
        of GPU memory, the smallest first. Raises UserError (exit 2) for a file that cannot be written."""
        if self.html is not None:
            from planner.picture.frontier import frontier_page

            _write(self.html, frontier_page(receipts, title=title))


NO_PICTURES = Pictures()


def redraw(file: Path, pictures: Pictures, *, title: str) -> None:
    """Write the pictures of the plan in `file`, a plan.json, with the times that its run has recorded. Raises
    UserError (exit 2) if there is no plan in it."""
    try:
        document = json.loads(file.read_text("utf-8"))
        plan, chain = plan_of(document["plan"]), chain_of(document["chain"])
        hardware, basis = from_json(Hardware, document["hardware"]), Basis.of(bool(document["measured"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"There is no plan in {file}.", code="no-plan", numbers=(str(error),), exit_code=Exit.USAGE
        ) from None
    pictures.write(plan, chain, hardware, title=title, basis=basis, measured=_measured(file.with_name(TIMELINE)))


def _measured(file: Path) -> Measured | None:
    """The times that a run has recorded in `file`; None if there are none, or none that can be read."""
    try:
        return from_json(Measured, json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error)) from None


def _cannot_write(path: Path, why: str) -> UserError:
    return UserError(
        f"The file {path} cannot be written: {why}.",
        code="cannot-write",
        hint="name another file",
        exit_code=Exit.USAGE,
    )
