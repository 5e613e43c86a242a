"""Trains a job until a number of steps are done: one process of those that `verify-resume` compares."""

from __future__ import annotations

import argparse

from planner.errors import Exit
from planner.job.schema import Job
from planner.measure.repeatable import Kernels
from planner.run.folder import RunFolder
from worker.training.metrics import read_metrics, steps_trained
from worker.training.run import run_job
from worker.training.stop import StopRequest


class Until(StopRequest):
    """Asks for a stop as soon as the run has done so many steps."""

    def __init__(self, run: RunFolder, steps: int) -> None:
        self._run, self._steps = run, steps
        super().__init__()

    @property
    def asked(self) -> bool:
        """Whether the run shall stop now, because the steps that it was to do are done."""
        return steps_trained(read_metrics(self._run.metrics)) >= self._steps

    @asked.setter
    def asked(self, value: bool) -> None:
        """Ignored: only the steps done ask for a stop."""


def train_until(job: Job, options: argparse.Namespace) -> tuple[Exit, str]:
    """Train the job of the run folder `own_run` with deterministic kernels, with a request to stop when step `step` is
    done. `refused`: operations that have no deterministic kernel (`planner.measure.repeatable.Kernels`). Returns exit
    code 75 (stopped after a checkpoint), or 0 where the job has ended, and an empty text."""
    run = options.own_run
    with Kernels(tuple(options.refused)).taken():  # two runs would differ anyway if kernels did not repeat
        return (Exit.DONE if run_job(run, Until(run, options.step)) else Exit.STOPPED), ""
