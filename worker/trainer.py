"""The process that trains one job: `python -m worker.trainer RUN_DIR`.

Exit codes: 0 done, 1 failed, 2 the job file, its data or its model are wrong, 3 an evaluation does not fit the budget,
74 the disk is full to the last byte, 75 stopped after a checkpoint. Errors that a person can act on go to stderr and
`error.json`; any other error is a bug of offmate and leaves its traceback in the log."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from planner.environment import before_torch
from planner.errors import Exit
from planner.fast_imports import lasting_imports
from planner.hub import speak_for_a_job
from planner.job.schema import Job
from planner.run.ending import exit_code_of
from planner.run.folder import RunFolder
from planner.run.plain_streams import speak_plainly
from worker.training.stop import Stopped, StopRequest


def main(arguments: list[str]) -> int:
    """Train the job in the run folder `arguments[0]`. Returns the exit code."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m worker.trainer RUN_DIR", file=sys.stderr)
        return Exit.USAGE
    stop = StopRequest()
    stop.install()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    folder = RunFolder(Path(arguments[0]).absolute())
    speak_for_a_job()
    folder.error.unlink(missing_ok=True)
    before_torch()  # so torch is imported only below
    try:
        return exit_code_of(lambda: _train(folder, stop), folder)
    except Stopped:
        logging.info("stopped before the first step")
        sys.stdout.flush()
        os._exit(Exit.STOPPED)  # a half-made engine may have threads that nobody will ever wake


def _train(folder: RunFolder, stop: StopRequest) -> Exit:
    with lasting_imports():
        import torch

        from planner.measure.repeatable import Kernels, repeatable_on_cpu
        from worker.training.run import run_job

    kernels: AbstractContextManager[None] = nullcontext()
    if Job.from_resolved(folder.resolved).deterministic:
        logging.info("kernels: %s, as deterministic: true asks for", Kernels())
        kernels = Kernels().taken()
    elif not torch.cuda.is_available():  # else a resumed run might not have the bits of one that was never stopped
        kernels = repeatable_on_cpu()
    with kernels:
        if not run_job(folder, stop):
            return Exit.STOPPED
    stop.ignore()  # the job is done, even if it is paused as it ends
    return Exit.DONE


if __name__ == "__main__":
    speak_plainly()
    sys.exit(main(sys.argv[1:]))
