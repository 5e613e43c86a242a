"""A dispatcher between a real store and a real broker, without workers, for tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offmated.config import Config
from offmated.jobs.migrate import upgrade
from offmated.jobs.queue_turns import Turn
from offmated.jobs.states import JobState
from offmated.jobs.store import Store
from offmated.paths import Paths
from offmated.service.broker import Broker
from offmated.service.dispatcher import Dispatcher
from planner.run.processes import Process, spawn


class Desk:
    """A store, a running broker, and a dispatcher between them."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.store = Store(f"sqlite:///{paths.database}")
        upgrade(self.store.engine, paths)
        self.broker = Broker.choose(Config.load(paths, {}), paths)
        assert self.broker.command is not None
        self.server = spawn(self.broker.command, folder=paths.broker)
        self.broker.wait_until_ready()
        self.redis = self.broker.connect()
        self.dispatcher = Dispatcher(self.store, self.broker)

    def add(self, priority: int = 0) -> int:
        def folder(job_id: int) -> Path:
            path = self.paths.run_folder(job_id)
            path.mkdir()
            return path

        return self.store.add("job", folder, Turn(priority=priority)).id

    def planned(self, priority: int = 0) -> int:
        number = self.add(priority)
        row = self.store.take(number, JobState.PLANNING, Process.current())
        assert row is not None
        self.store.end(row, 0)
        return number

    def sent(self, name: str) -> list[int]:
        """Job numbers in a queue's messages."""
        return [job.args[0] for job in self.broker.queue(name, self.redis).jobs]


@contextmanager
def short_paths() -> Iterator[Paths]:
    """A state folder whose sockets have short paths."""
    home = Path(tempfile.mkdtemp(prefix="offmate-", dir="/tmp"))
    try:
        yield Paths.at(home / "state")
    finally:
        shutil.rmtree(home)


@contextmanager
def desk_at(paths: Paths) -> Iterator[Desk]:
    """A desk on a state folder, its broker ended at the end."""
    paths.create()
    desk = Desk(paths)
    try:
        yield desk
    finally:
        desk.redis.close()
        desk.server.kill()
        desk.server.wait()


def dead_process() -> Process:
    """A process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process.of(child.pid)
    assert process is not None
    child.communicate(b"\n")
    return process
