"""`python -m offmated`: the daemon, in front."""

from __future__ import annotations

import logging
import sys

from offmated.paths import Paths
from offmated.service.daemon import run
from planner.errors import UserError


def main() -> int:
    """Run the daemon of this user. Exit code 0 after a stop, otherwise the UserError's."""
    logging.basicConfig(format="%(asctime)s offmated[%(process)d] %(message)s", level=logging.INFO)
    for talkative in ("alembic", "uvicorn"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    try:
        return run(Paths.from_environment())
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
