"""The real planner, which waits at its start for a file `go` in the run folder where the job is called "slow-plan"."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

from tests import ROOT

if "plan" in sys.argv[1:2]:
    folder = Path(sys.argv[2])
    slow = "run_name: slow-plan" in (folder / "resolved.yaml").read_text()
    while slow and not (folder / "go").exists():
        time.sleep(0.05)
runpy.run_path(str(ROOT / "planner" / "__main__.py"), run_name="__main__")
