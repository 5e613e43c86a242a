"""Starts the command `offmate`. Ctrl-C ends it in the same way while modules are still being imported as later."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from planner.environment import number_cards_by_slot


def main() -> None:
    """Run the command line. Exits with code 130 after Ctrl-C."""
    number_cards_by_slot()  # for all processes that it starts
    _be_found_by_children()
    try:
        from offmated.cli import main as command_line
    except KeyboardInterrupt:
        sys.exit(130)  # Exit.INTERRUPTED: nothing is imported yet
    command_line()


def _be_found_by_children() -> None:
    """Put the source folder on PYTHONPATH where offmate was found only because Python looks into the current folder.
    The processes that it starts do not look there (`python -P`): they would find no offmate, or another one that is
    installed."""
    folder, before = Path(__file__).resolve().parents[1], os.environ.get("PYTHONPATH", "")
    if Path(sys.path[0]).resolve() == folder and str(folder) not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))
