"""Stands where worker/prepare.py does, for tests of the daemon: it says what a real one would, of no data."""

from __future__ import annotations

import sys
from pathlib import Path

from planner.counted import Counted
from planner.run.folder import RunFolder

RunFolder(Path(sys.argv[1])).write_counted(Counted(longest=1, lengths=(64, 64)))
