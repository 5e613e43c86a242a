"""Watches, through NVIDIA's management library (NVML), which other programs use the GPU, and decides when jobs leave it
to them."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

import psutil

from offmated.jobs import nvml
from planner.errors import Exit, UserError

log = logging.getLogger(__name__)

EVERY_S = 5.0
MANY_BYTES = 512 * 2**20  # for a program that draws: a game takes more, a desktop and its browser mostly less
_CERTAIN = 2  # readings that must agree: a program that is gone at once, like a monitoring tool, wants no room


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A process that uses the GPU. `computes`: it uses CUDA and does not draw. `used_bytes`: its GPU memory; None where
    NVML does not say."""

    pid: int
    computes: bool
    used_bytes: int | None


def read_users() -> tuple[User, ...]:
    """All processes on the first GPU that jobs may use. Raises RuntimeError where there is no such GPU, or its driver
    does not answer."""
    import pynvml  # late: an extra

    try:
        pynvml.nvmlInit()
        device = nvml.device(pynvml)
        users = {}
        for computes, ask in (
            (False, pynvml.nvmlDeviceGetGraphicsRunningProcesses),
            (True, pynvml.nvmlDeviceGetComputeRunningProcesses),
        ):
            for process in ask(device):
                users[process.pid] = User(pid=process.pid, computes=computes, used_bytes=process.usedGpuMemory)
        return tuple(users.values())
    except pynvml.NVMLError as error:
        raise RuntimeError(str(error)) from None


def others(users: Collection[User], ours: Collection[int]) -> tuple[str, ...]:
    """The names of those programs among `users` that want the GPU for themselves: those that compute, and those that
    draw with at least `MANY_BYTES` of its memory. `ours`: the numbers of processes that do not count."""
    names = []
    for user in users:
        wants = user.computes or (user.used_bytes or 0) >= MANY_BYTES
        if wants and user.pid not in ours:
            try:
                names.append(psutil.Process(user.pid).name())
            except psutil.Error:
                names.append(f"process {user.pid}")  # of another user, or gone since
    return tuple(sorted(set(names)))


def own_processes() -> set[int]:
    """The process numbers of this process and of all its descendants."""
    return {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}


class Yielding:
    """Decides whether jobs leave the GPU to other programs: from the second reading in a row that shows one, until none
    has been there for `idle_s` seconds."""

    def __init__(self, idle_s: float, *, yields: bool = False) -> None:
        self.idle_s = idle_s
        self.yields = yields
        self._seen = 0
        self._idle_since: float | None = None

    def take(self, now: float, users: Collection[str]) -> bool:
        """Take in a reading, and return whether jobs leave the GPU to other programs now. `now`: seconds of a monotonic
        clock. `users`: the names of the programs that want the GPU."""
        if users:
            self._seen, self._idle_since = self._seen + 1, None
            self.yields = self.yields or self._seen >= _CERTAIN
            return self.yields
        self._seen = 0
        self._idle_since = now if self._idle_since is None else self._idle_since
        self.yields = self.yields and now - self._idle_since < self.idle_s
        return self.yields


class Watcher:
    """Reads every few seconds which programs use the GPU, and calls `tell` when jobs are to leave it or may use it
    again: with the names of the programs that they leave it to, or with (). `read`: a function like `read_users`."""

    def __init__(
        self,
        yielding: Yielding,
        tell: Callable[[tuple[str, ...]], None],
        read: Callable[[], tuple[User, ...]] = read_users,
    ) -> None:
        self._yielding = yielding
        self._tell = tell
        self._read = read
        self._due = 0.0

    def tick(self, now: float) -> None:
        """Read which programs use the GPU, when it is time. Raises RuntimeError where the driver does not answer; then
        nothing changes."""
        if now < self._due:
            return
        self._due = now + EVERY_S
        users = self._read()
        names = others(users, own_processes()) if users else ()
        before = self._yielding.yields
        if self._yielding.take(now, names) is not before:
            log.info("jobs leave the GPU to %s" if names else "the GPU is idle: jobs go on%s", ", ".join(names))
            self._tell(names)


def idle_seconds(minutes: str) -> float:
    """The setting `yield_minutes`, converted to seconds. Raises UserError where it is not a number from 0 to 1440, and
    where the package that asks the GPU's driver is not installed."""
    try:
        number = float(minutes)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 24 * 60:
        raise UserError(
            f'yield_minutes is "{minutes}"; it must be a number of minutes from 0 to 1440.',
            code="bad-config",
            hint='yield_minutes = "10" in config.toml',
            exit_code=Exit.USAGE,
        )
    if importlib.util.find_spec("pynvml") is None:
        raise UserError(
            "To see who else uses the GPU the package nvidia-ml-py is needed.",
            code="no-nvml",
            hint="pip install 'offmate[yield]'",
            exit_code=Exit.USAGE,
        )
    return 60 * number
