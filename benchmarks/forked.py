"""Processes that begin as copies of this one: what it has imported and made is theirs at once.

Until the last of them has begun, the process that forks must neither begin CUDA nor compute with several threads:
neither outlives a fork. `Forks` sees to the threads; `check_cuda` is for what is forked and computes.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

# Whether there is a card is asked of its driver's library: PyTorch's own way begins CUDA. Read when it is asked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import psutil
import torch

from planner.codec import Json
from planner.run.processes import die_with

_FORK = multiprocessing.get_context("fork")
_PATIENCE_S = 10.0
_BEGIN = psutil.Process().create_time()


def said(text: str) -> None:
    """Print it with the seconds since this program began, or the one that it was forked from."""
    print(f"{time.time() - _BEGIN:7.1f} s  {text}", flush=True)


def check_cuda() -> None:
    """Raise where CUDA cannot begin in this process, for it had in the one that it was forked from."""
    if torch.cuda._is_in_bad_fork():
        raise RuntimeError("CUDA had begun in the process that forked this one; nothing there may have asked for it")


class Ended(Exception):
    """A process that ended without an answer; the text has its exit code."""


class Forked:
    """`work`, which gets its end of a pipe, in a process and a session of its own; it dies with the one that made it.
    What it prints goes to `log`, else to stderr."""

    def __init__(self, work: Callable[[Connection], None], threads: int, log: Path | None) -> None:
        self._pipe, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_run, args=(work, theirs, os.getpid(), threads, log))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        """It is told that there is nothing more to do, and killed where it does not end."""
        with suppress(OSError):
            self.tell(None)
        self.wait(_PATIENCE_S)

    def tell(self, message: Json) -> None:
        """Send it something. Raises OSError where it has ended."""
        self._pipe.send_bytes(json.dumps(message).encode())

    def answer(self) -> Json:
        """What it sends next. Raises Ended."""
        try:
            found: Json = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise Ended(f"exit code {self.wait(_PATIENCE_S)}") from None
        return found

    def wait(self, most_s: float) -> int | None:
        """Its exit code, or None where it has not ended by then: it is killed, with all that it has started."""
        self._process.join(most_s)
        code = self._process.exitcode
        self._process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)  # what it has started may outlive it
        self._process.join(_PATIENCE_S)  # one that waits in the driver does not end even so
        self._pipe.close()
        return code


class Forks:
    """Starts them. From now on this process computes with one thread; they have as many as it had."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # or each of them would look through all that is imported for garbage, and copy its pages
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def start(self, work: Callable[[Connection], None], log: Path | None = None) -> Forked:
        """Begin `work`."""
        return Forked(work, self._threads, log)

    def answers(self, works: Sequence[Callable[[], Json]], at_once: int) -> Iterator[Json]:
        """Of each in its order, `at_once` of them working at a time. Raises Ended."""
        waiting, running = deque(works), deque[Forked]()
        with ExitStack() as all_of_them:
            while waiting or running:
                while waiting and len(running) < at_once:
                    work = partial(_answer, waiting.popleft())
                    running.append(all_of_them.enter_context(self.start(work)))
                yield running.popleft().answer()


def _answer(work: Callable[[], Json], pipe: Connection) -> None:
    pipe.send_bytes(json.dumps(work()).encode())


def _run(work: Callable[[Connection], None], pipe: Connection, parent: int, threads: int, log: Path | None) -> None:
    os.setsid()
    die_with(parent)
    if log is None:
        os.dup2(2, 1)  # stdout is for the answers of the process that forked this one
    else:
        with log.open("ab") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1, encoding="utf-8") for number in (1, 2))
    torch.set_num_threads(threads)
    work(pipe)
