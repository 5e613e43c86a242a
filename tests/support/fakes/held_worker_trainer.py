"""The real trainer, standing still where worker_trainer.py does: after its 20th step where the job is called "held" or
"firm", until there is a file `go` in the run folder (or, "held", a SIGTERM), between the last step and the model folder
where it is called "late"; at the 20th step it needs room on the disk that a file `disk` names. Two that have the GPU at
once are told of in the file `twice` of the state folder."""

from __future__ import annotations

import fcntl
import os
import runpy
import sys
import time
from pathlib import Path

import yaml

from planner.disk import check_space
from planner.job.output_dir import Place
from tests import ROOT
from worker.training.metrics import Metrics
from worker.training.stop import StopRequest

HELD_AT = 20
folder = Path(sys.argv[1]).absolute()
name = yaml.safe_load((folder / "resolved.yaml").read_text())["run_name"]
stops: list[StopRequest] = []
install, write, begin = StopRequest.install, Metrics.write, Place.begin


def installed(self: StopRequest) -> None:
    stops.append(self)
    install(self)


def wait_for_go(heeding: bool) -> None:
    while not (heeding and any(stop.asked for stop in stops)) and not (folder / "go").exists():
        time.sleep(0.02)


def written(self: Metrics, event: str, *, step: int, **values: str | int | float | None) -> None:
    write(self, event, step=step, **values)
    if (event, step) != ("step", HELD_AT):
        return
    if name in ("held", "firm"):
        wait_for_go(heeding=name == "held")
    if (disk := folder / "disk").exists():
        check_space(Path(disk.read_text()), 2**19, "the checkpoint")


def begun(self: Place) -> Path:
    if name == "late" and any(folder.glob("trained/step-*")):  # the place is tried out before the first step, too
        wait_for_go(heeding=True)
    return begin(self)


StopRequest.install, Metrics.write, Place.begin = installed, written, begun  # type: ignore[method-assign]
with (folder / "pids").open("a") as pids:
    pids.write(f"{os.getpid()}\n")
gpu = (folder.parents[1] / "gpu").open("a")
try:
    fcntl.flock(gpu, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    with (folder.parents[1] / "twice").open("a") as twice:
        twice.write(f"{folder.name}\n")
runpy.run_path(str(ROOT / "worker" / "trainer.py"), run_name="__main__")
