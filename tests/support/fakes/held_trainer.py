"""The real trainer, standing still after a step whose line is written, until it reads a line: `held_trainer.py STEP
RUN_DIR`; with step 0 as it ends, when it has said so. So a test meets it where it wants, however fast the machine
is."""

from __future__ import annotations

import sys

from worker import trainer
from worker.training.metrics import Metrics

held_at = int(sys.argv[1])
write = Metrics.write


def hold(self: Metrics, event: str, *, step: int, **values: str | int | float | None) -> None:
    write(self, event, step=step, **values)
    if (event, step) == ("step", held_at):
        sys.stdin.readline()


Metrics.write = hold
code = trainer.main(sys.argv[2:])
if held_at == 0:
    print("the trainer ends", flush=True)
    sys.stdin.readline()
sys.exit(code)
