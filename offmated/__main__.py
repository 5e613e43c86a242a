"""`python -m offmated` runs the daemon in the foreground."""

from __future__ import annotations

import logging
import mmap
import os
import sys

from offmated.paths import Paths
from planner.environment import number_cards_by_slot
from planner.errors import Exit, UserError, check_linux, is_out_of_memory, out_of_memory

ROOM_BYTES = 256 * 2**20  # address space: importing the daemon takes a third of it, each thread's stack 8 MiB


def main() -> int:
    """Run this user's daemon until it is stopped. Returns exit code 0 after a stop, otherwise that of the UserError
    that ended it."""
    if sys.argv[1:]:
        sys.stderr.write("This is the daemon, which takes no arguments.\n  hint: offmate --help tells of the command\n")
        return Exit.USAGE
    logging.basicConfig(format="%(asctime)s offmated[%(process)d] %(message)s", level=logging.INFO)
    for talkative in ("alembic", "uvicorn"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    number_cards_by_slot()  # for the jobs; systemd starts the daemon without the command line
    try:
        check_linux()
        # Checked before the import. With less, a module would abort while it is imported, or the API's thread would end
        # later, and nobody would reach the daemon.
        mmap.mmap(-1, ROOM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        from offmated.service.daemon import run

        return run(Paths.from_environment())
    except Exception as error:
        if is_out_of_memory(error):
            error = out_of_memory("the daemon")
        if isinstance(error, UserError):
            sys.stderr.write(f"{error}\n")
            return error.exit_code
        logging.exception("the daemon ends for a reason nobody thought of")
        return Exit.FAILED


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # so that the process does not wait for a thread that still works on an answer
