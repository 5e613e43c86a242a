"""How the processes of a job end: with an exit code, and an error that a person can act on where there is one."""

from __future__ import annotations

import sys
from collections.abc import Callable

from planner.errors import Exit, UserError, disk_full, is_disk_full
from planner.hub import NOT_REACHED
from planner.run.folder import RunFolder


def exit_code_of(act: Callable[[], int], run: RunFolder | None) -> int:
    """What `act` returns, or the code of the UserError that it raises, which goes to stderr and to the run folder. A
    full disk is such an error, whoever met it. That the hub is not reached is said by who started the process, in one
    line with when it is asked again. Any other is our bug, and is raised."""
    try:
        return act()
    except UserError as error:
        told = error
    except Exception as error:
        if not is_disk_full(error):
            raise
        told = disk_full(error)
    try:
        if run is None or told.code != NOT_REACHED:
            print(told, file=sys.stderr, flush=True)
        if run is not None:
            run.write_error(told)
    except OSError as error:
        if not is_disk_full(error):
            raise
        return Exit.NO_ROOM_TO_SAY
    return told.exit_code
