"""The command `offmate` from its first moment on: Ctrl-C while modules are imported ends it as it does later."""

from __future__ import annotations

import sys

from planner.environment import number_cards_by_slot


def main() -> None:
    """Run the command line. Exit code 130 after Ctrl-C."""
    number_cards_by_slot()  # for all that it starts
    try:
        from offmated.cli import main as command_line
    except KeyboardInterrupt:
        sys.exit(130)  # Exit.INTERRUPTED: nothing is imported yet
    command_line()
