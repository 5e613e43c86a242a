"""Runs a job's processes one after the other, and passes stop requests (SIGTERM) on to them. No threads.

SIGTERM and SIGCHLD are blocked and fetched with sigtimedwait, so that no signal is lost between a check and a wait. The
caller decides what a SIGTERM means: to end the job for good, or to stop it and continue later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from planner.errors import Exit, UserError
from planner.run.folder import RunFolder
from planner.run.oom import be_first, killed_for_memory, kills
from planner.run.processes import Process, end_session, spawn
from planner.units import format_seconds

_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
_UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # people follow a log while it is written
INSIST_EVERY_S = 0.5
INSIST_PATIENCE_S = 30.0


class Watch:
    """A context that runs child processes and passes SIGTERM on to them. In it, a SIGTERM does not end this process: it
    goes to the running child, or keeps the next child from starting.

    `for_good`: called after a SIGTERM; returns whether the job is to end without a checkpoint.
    """

    def __init__(self, for_good: Callable[[], bool]) -> None:
        self._for_good = for_good
        self._asked = False

    def __enter__(self) -> Watch:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        return self

    def __exit__(self, *error: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def run(
        self, command: Sequence[str], run: RunFolder, *, keep_output: bool = True, limit_s: float = float("inf")
    ) -> int:
        """Run `command` in the run folder until it ends, and return its exit code. A negative one is the number of the
        signal that ended it; -15 can also mean that a stop was requested before it started.

        Its stderr and, with `keep_output`, its stdout are appended to the job's log. After `limit_s` seconds it is
        killed, and the job's error says so. However it ends, all processes that it started are ended, too.
        """
        end_leftover(run)
        if self._stop_pending():
            return -signal.SIGTERM
        with run.log.open("ab") as log:
            output = log if keep_output else subprocess.DEVNULL
            child = spawn(command, folder=run.path, output=output, errors=log, environment=_UNBUFFERED)
        if process := Process.of(child.pid):
            # A full disk may prevent this. It does no harm: the child dies with this process, so none is left to find.
            with suppress(OSError):
                run.process.write_text(str(process))
        be_first(child.pid)
        before = kills()
        code = self._wait(child, time.monotonic() + limit_s)
        try:
            end_session(child.pid, Path(os.path.realpath(run.path)))
        except TimeoutError as error:  # the job has ended all the same; the next start waits for these processes
            with suppress(OSError):
                run.say(str(error))
        if code is None:
            with suppress(OSError):
                run.write_error(_hung(_name(command), limit_s))
            code = int(Exit.FAILED)
        if code == -signal.SIGKILL and kills() > before:
            with suppress(OSError):
                run.write_error(killed_for_memory(_name(command), run.last_checkpoint_step()))
        run.process.unlink(missing_ok=True)
        return code

    def _stop_pending(self) -> bool:
        self._asked = self._asked or signal.sigtimedwait([signal.SIGTERM], 0) is not None
        return self._asked

    def _wait(self, child: subprocess.Popen[bytes], limit: float) -> int | None:
        """The exit code of the child; None where it was killed because it still ran at the time `limit`."""
        insist_at = deadline = float("inf")
        while (code := child.poll()) is None:
            got = signal.sigtimedwait(_SIGNALS, min(max(0.0, min(insist_at, limit) - time.monotonic()), 3600.0))
            now = time.monotonic()
            if now > limit:
                child.kill()
                child.wait()
                return None
            if got is not None and got.si_signo == signal.SIGTERM:
                # A first SIGTERM asks for a checkpoint, a second one cancels that: pass on only the first, unless
                # `for_good`.
                if not self._asked:
                    child.terminate()
                self._asked = True
                if insist_at == float("inf") and self._for_good():
                    insist_at, deadline = now + INSIST_EVERY_S, now + INSIST_PATIENCE_S
            if now >= insist_at:  # by the clock, because signals may end each wait early
                child.terminate()
                insist_at = now + INSIST_EVERY_S
            if now > deadline:
                child.kill()
        return code


def _hung(name: str, limit_s: float) -> UserError:
    return UserError(
        f"The {name} had not ended after {format_seconds(limit_s)}, and was killed: other jobs waited for it.",
        code="process-hangs",
        hint="the job's log says how far it got; a pattern or a template in the job file may take too long to evaluate",
    )


def _name(command: Sequence[str]) -> str:
    """The name for people of the process of a command such as `python -P -m worker.trainer …`."""
    module = next((word for word in command if word.partition(".")[0] in ("worker", "planner")), "process")
    return "data reader" if module == "worker.prepare" else module.rpartition(".")[2]


def end_leftover(run: RunFolder) -> None:
    """End the process that an earlier daemon may have left running for this run folder, and remove its unfinished
    files. Raises TimeoutError if the process does not end."""
    try:
        leftover = Process.parse(run.process.read_text())
    except FileNotFoundError:
        run.tidy()
        return
    except ValueError:  # torn by a crash while it was written: the watcher died, and the process with it
        leftover = None
    if leftover is not None:
        leftover.kill()
        if leftover.this_boot():
            end_session(leftover.pid, Path(os.path.realpath(run.path)))
    run.process.unlink(missing_ok=True)
    run.tidy()
