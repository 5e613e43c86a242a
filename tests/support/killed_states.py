"""Kill a training at any moment, go on from its last checkpoint, end with the bits of one that nobody disturbed.

    python -m tests.support.killed_states FOLDER KILLS SEED

Children are forked, so that a start costs nothing. Prints the kills there were, or what was wrong.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.stored_states import PIECE, Training, digest, steps_of, stored
from worker.storage.checkpoint import Checkpoints, Origin
from worker.storage.states import StatesOnDisk

STEPS = 8


def train(folder: Path, every: int) -> str:
    """From the last checkpoint, or from the start, to the end."""
    torch.set_num_threads(1)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, origin=Origin(job={}, data="", total_steps=0, plan=""))
    last = checkpoints.latest()
    found = last.states if last is not None else None
    states = StatesOnDisk([folder / "0", folder / "1"], stored(), piece_elements=PIECE, homes=2, record=found)
    training = Training(states, last.step if last is not None else 0)
    for step in steps_of(training, every, STEPS, threads=True):
        checkpoints.save(step, [], 0, states=states)
    return digest(training.all_states())


def in_child(act: Callable[[], str]) -> tuple[int, int]:
    """Its process, and where its answer is to be read."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(read)
            os.write(write, act().encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    return pid, read


def answer(pid: int, read: int) -> str:
    """What the child said; "" where it was killed."""
    os.waitpid(pid, 0)
    with os.fdopen(read, "rb") as file:
        return file.read().decode()


def campaign(folder: Path, kills: int, seed: int) -> str:
    """What there is to say after so many kills."""
    draw, killed, began = random.Random(seed), 0, time.monotonic()
    want = answer(*in_child(lambda: train(folder / "undisturbed", 3)))
    whole_s = time.monotonic() - began
    rounds = 0
    while killed < kills:
        rounds += 1
        every = draw.choice((1, 2, 3))
        while True:
            pid, read = in_child(lambda every=every: train(folder / "killed", every))  # type: ignore[misc]
            time.sleep(draw.uniform(0, 0.7) * whole_s if killed < kills else 0)
            if killed < kills:
                os.kill(pid, signal.SIGKILL)
            if (got := answer(pid, read)) == "":
                killed += 1
            elif got != want:
                return f"after {killed} kills: {got}, not {want}"
            else:
                break
        shutil.rmtree(folder / "killed")
    return f"{killed} kills, {rounds} trainings, the same bits"


if __name__ == "__main__":
    print(campaign(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
