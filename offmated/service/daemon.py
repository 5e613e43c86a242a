"""The daemon: one process that owns the database's upkeep, the broker, the workers and the API.

The main thread supervises and dispatches, since its children die with the thread that starts them; the API has a
thread of its own.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import time
from typing import Any

from sqlalchemy.exc import OperationalError

from offmated.api.app import Services, make_app
from offmated.api.server import Server
from offmated.config import Config
from offmated.jobs.database import choose_journal
from offmated.jobs.migrate import upgrade
from offmated.jobs.states import StopReason
from offmated.jobs.store import Store
from offmated.lock import sole_daemon
from offmated.paths import Paths
from offmated.service.broker import QUEUES, Broker
from offmated.service.dispatcher import Dispatcher
from offmated.service.supervisor import Child
from offmated.service.wakeup import Bell
from offmated.trouble import Troubles
from planner.errors import Exit
from planner.run.processes import Process

log = logging.getLogger(__name__)

_RQ_WORKER = (sys.executable, "-P", "-m", "offmated.service.rqworker")
TICK_S = 0.5
STOP_TICK_S = 0.1
HORSE_PATIENCE_S = 5.0
PASSING = (OperationalError, OSError)
"""What may pass: a full disk, a database that is locked or away, no memory for a process. Whatever was to be done is
still to be done, and the next tick sees it."""


def run(paths: Paths) -> Exit:
    """Be the daemon, until SIGTERM, SIGINT or `POST /shutdown`. Raises UserError when it cannot start, among others
    `already-running`."""
    os.umask(0o077)
    paths.create()
    os.chdir(paths.state)  # the caller's folder may be unmounted later
    with sole_daemon(paths):
        Daemon(paths).run()
    return Exit.DONE


class Daemon:
    """One run of the daemon; the lock is held."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._config = Config.load(paths)
        self._broker = Broker.choose(self._config, paths)
        self._store = Store(self._config.database_url)
        self._dispatcher = Dispatcher(self._store, self._broker)
        self._troubles = Troubles()
        self._bell = Bell()
        self._signals = 0
        self._down_asked = False
        self._closing = False
        self._started = time.time()
        environment = paths.environment()
        command = self._broker.command
        self._servers = (
            [Child("broker", command, paths.broker, environment, socket=paths.broker_socket)] if command else []
        )
        self._workers = [
            Child(f"{name}-worker", [*_RQ_WORKER, name], paths.state, environment)
            for name in QUEUES
        ]
        services = Services(
            store=self._store,
            paths=self._paths,
            wake=self._bell.ring,
            shut_down=self._ask_down,
            closing=lambda: self._closing,
            health=self._health,
        )
        self._api = Server(make_app(services), paths.api_socket)

    def run(self) -> None:
        """Start everything, keep it going, end it in the order that loses nothing."""
        # A handler may come at any point of the main thread, its own code included: it counts, and takes no lock.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._count_signal())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._bell.ring_at_signals()
        choose_journal(self._store.engine)
        upgrade(self._store.engine, self._paths)
        if self._servers:
            # Its file is for its own deaths while this daemon lives. The database has all that matters, and a file that
            # a full disk or a power cut has damaged would keep the broker from starting.
            shutil.rmtree(self._paths.broker)
            self._paths.broker.mkdir()
        self._keep(self._servers)
        self._broker.wait_until_ready()
        self._dispatcher.adopt(blameless=True)
        try:
            self._api.keep()
            self._keep(self._workers)
            log.info("ready: %s", self._paths.api_socket)
            while not self._stops_asked:
                self._tick()
                self._bell.sleep(TICK_S)
            log.info("stopping")
            self._stop_workers()
        finally:
            self._closing = True
            self._api.close()
        for server in self._servers:
            server.terminate()
        while not all(server.gone() for server in self._servers):
            time.sleep(0.01)
        log.info("stopped")

    def _tick(self) -> None:
        self._listen()
        with self._troubles.of("a look at jobs and workers", *PASSING):
            self._keep([*self._servers, *self._workers])
            self._dispatcher.adopt()
            self._dispatcher.pass_on_stops()
            self._dispatcher.hand_out()

    def _stop_workers(self) -> None:
        """Have running jobs save and end, and the workers with them. A second request to stop kills."""
        for worker in self._workers:
            worker.terminate()
        while not all(worker.gone() for worker in self._workers):
            if self._stops_asked > 1:
                for worker in self._workers:
                    worker.kill()
            self._listen()
            with self._troubles.of("stopping the jobs", *PASSING):
                self._keep(self._servers)
                # Again and again: a worker may have been about to take a job.
                for row in self._store.jobs(*QUEUES.values()):
                    self._store.stop(row.id, StopReason.SHUTDOWN)
                self._dispatcher.pass_on_stops()
            self._bell.sleep(STOP_TICK_S)
        # A killed worker's horse dies a moment after it. What is not back by then, the next daemon takes back.
        deadline = time.monotonic() + HORSE_PATIENCE_S
        with self._troubles.of("taking the last jobs back", *PASSING):
            while self._store.jobs(*QUEUES.values()) and time.monotonic() < deadline:
                self._dispatcher.adopt(blameless=True)
                time.sleep(0.01)

    def _listen(self) -> None:
        """Keep the API's socket. Jobs do not need it: without it everything else goes on."""
        with self._troubles.of("listening", *PASSING):
            self._api.keep()

    def _keep(self, children: list[Child]) -> None:
        for child in children:
            child.keep()

    @property
    def _stops_asked(self) -> int:
        """Requests to stop. Those through the API count once, so that they alone are never the second, which kills."""
        return self._signals + self._down_asked

    def _count_signal(self) -> None:
        self._signals += 1

    def _ask_down(self) -> None:
        self._down_asked = True
        self._bell.ring()

    def _health(self) -> dict[str, Any]:
        return {
            "state": "stopping" if self._stops_asked else "running",
            "process": str(Process.current()),
            "pid": os.getpid(),
            "started_at": self._started,
            "state_folder": str(self._paths.state),
            "children": {
                child.name: {"pid": child.pid, "restarts": child.restarts} for child in [*self._servers, *self._workers]
            },
        }
