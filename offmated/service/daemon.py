"""Runs the daemon: one process that upgrades the database and keeps the broker, the workers and the API running.

The main thread supervises and dispatches, since its children die with the thread that starts them. The API has a thread
of its own."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

from offmated.api.addresses import UnixAddress
from offmated.api.app import Services, make_app
from offmated.api.server import Server
from offmated.config import Config
from offmated.jobs.adopt import follow_runs
from offmated.jobs.database import choose_journal
from offmated.jobs.migrate import upgrade
from offmated.jobs.queue_changes import leave_gpu, yields
from offmated.jobs.states import JobState, StopReason
from offmated.jobs.store import Store
from offmated.jobs.submission import sweep_drafts, window_of
from offmated.lock import Lock
from offmated.log_file import keep_short
from offmated.paths import Paths
from offmated.repeated_errors import RepeatedErrors
from offmated.service.broker import QUEUES, Broker
from offmated.service.browsers import Browsers
from offmated.service.dispatcher import Dispatcher
from offmated.service.gpu_users import Watcher, Yielding, idle_seconds
from offmated.service.notifier import Notifier, forget_others
from offmated.service.notify import address_names, check_notify
from offmated.service.supervisor import Child, living_children
from offmated.service.systemd import ServiceManager
from offmated.service.wakeup import WakeupPipe
from offmated.trackers.feeder import Feeder
from offmated.version import API, release
from planner.errors import Exit, UserError
from planner.run.processes import Process

log = logging.getLogger(__name__)

_RQ_WORKER = (sys.executable, "-P", "-m", "offmated.service.rqworker")
TICK_S = 0.5
STOP_TICK_S = 0.1
HORSE_PATIENCE_S = 5.0
QUIET_PATIENCE_S = 5.0  # for a worker without a job to end: a broker that hangs would keep it for minutes
BUSY_PATIENCE_S = 60.0  # the same while the database does not answer: the worker may have a job's end to write there
SERVER_PATIENCE_S = 5.0  # for the broker to end
SILENT_PATIENCE_S = 10.0  # for our own broker to answer again, before it is started anew


def run(paths: Paths) -> Exit:
    """Run the daemon in this process, until SIGTERM, SIGINT or `POST /shutdown`. The process holds the lock until it is
    gone. Returns the exit code. Raises UserError when it cannot start, among others `already-running`."""
    os.umask(0o077)
    paths.create()
    os.chdir(paths.state)  # the caller's folder may be unmounted later
    Daemon(paths, Lock(paths)).run()
    return Exit.DONE


class Daemon:
    """One run of the daemon, from start to end. The lock, which keeps a second daemon from starting, must be held
    already."""

    def __init__(self, paths: Paths, lock: Lock) -> None:
        self._paths = paths
        self._lock = lock
        self._config = Config.load(paths)
        if self._config.window is not None:
            window_of(self._config.window)  # or each submission would be refused
        check_notify(self._config.notify)
        minutes = self._config.yield_minutes
        self._idle_s = idle_seconds(minutes) if minutes is not None else None
        self._watcher: Watcher | None = None
        self._broker = Broker.choose(self._config, paths)
        self._store = Store(self._config.database_url)
        self._dispatcher = Dispatcher(self._store, self._broker)
        self._errors = RepeatedErrors()
        self._wakeup = WakeupPipe()
        self._manager = ServiceManager(os.environ)  # before any child starts
        self._signals = 0
        self._down_asked = False
        self._closing = False
        self._started = time.time()
        self._release = release()  # now: an upgrade may replace the package's metadata
        environment = paths.environment()
        command = self._broker.command
        self._servers = (
            [Child("broker", command, paths.broker, environment, socket=paths.broker_socket)] if command else []
        )
        self._workers = {
            name: Child(f"{name}-worker", [*_RQ_WORKER, name], paths.state, environment) for name in QUEUES
        }
        self._notifiers = {
            name: Notifier(self._store, paths.state, environment, name) for name in address_names(self._config.notify)
        }
        self._feeder = Feeder(self._store, paths.state, environment)
        services = Services(
            store=self._store,
            paths=self._paths,
            wake=self._wakeup.wake,
            shut_down=self._ask_down,
            closing=lambda: self._closing,
            health=self._health,
            page=lambda: self._browsers.page(),
            window=self._config.window,
        )
        app = make_app(services)
        self._api = Server(app, UnixAddress(paths.api_socket))
        self._browsers = Browsers(app, self._config.listen, paths.token, paths.page_port)

    def run(self) -> None:
        """Start the broker, the workers and the API, keep them running, and end them in an order that loses nothing."""
        # A signal handler may run at any point of the main thread, also within itself. So it only counts, and takes no
        # lock.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._count_signal())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakeup.wake_at_signals()
        upgrade(self._store.engine, self._paths)  # first, as it finds out whether the database can be used
        self._store.engine.dispose()
        choose_journal(self._store.engine)
        sweep_drafts(self._paths)
        follow_runs(self._store, self._paths)
        forget_others(self._store, tuple(self._notifiers))
        if self._idle_s is None:
            leave_gpu(self._store, False)  # may be left from when the settings asked for it
        else:
            yielding = Yielding(self._idle_s, yields=yields(self._store))
            self._watcher = Watcher(yielding, lambda names: leave_gpu(self._store, bool(names)))
        # The broker's files serve only its restarts while this daemon lives. The database has all that matters, and a
        # file that a full disk or a power cut has damaged would keep the broker from starting.
        self._broker.forget(self._paths.broker)
        self._keep(self._servers)
        self._broker.wait_until_ready()
        self._dispatcher.adopt(blameless=True)
        try:
            self._api.keep()
            self._keep(self._workers.values())
            log.info("ready: %s", self._paths.api_socket)
            self._manager.ready()
            while not self._stops_asked:
                self._tick()
                self._manager.alive()
                self._wakeup.sleep(TICK_S)
            log.info("stopping")
            self._manager.stopping()
            self._stop_workers()
        finally:
            self._closing = True
            self._browsers.close()
            self._api.close()
        self._end_servers()
        log.info("stopped")

    def _tick(self) -> None:
        """Do everything that is due, each part by itself: a part that fails does not keep the others from being done,
        and is tried again at the next tick. Whatever is wrong, the daemon does not end here, as that would end jobs
        that train well."""
        self._listen()
        self._keep_lock()
        with self._errors.of("putting the log aside", OSError):
            keep_short(self._paths)
        self._keep([*self._servers, *self._workers.values()])
        states = frozenset(JobState)  # where the database does not answer, each part finds that out by itself
        with self._errors.of("seeing what jobs there are", Exception):
            states = self._store.living()
        for work, do in (
            ("seeing who uses the GPU", self._watch_gpu),
            *self._dispatcher.parts(states),
            ("telling people", self._tell),
            ("telling trackers", lambda: self._feeder.tick(states)),
        ):
            with self._errors.of(work, Exception):
                do()
        if self._dispatcher.broker_silent_s() > SILENT_PATIENCE_S:
            for server in self._servers:
                log.warning("%s has not answered for %.0f s, and starts again", server.name, SILENT_PATIENCE_S)
                server.kill()

    def _watch_gpu(self) -> None:
        if self._watcher is not None:
            self._watcher.tick(time.monotonic())

    def _tell(self) -> None:
        for notifier in self._notifiers.values():
            notifier.tick()

    def _stop_workers(self) -> None:
        """Have running jobs save and end, and the workers with them. A second request to stop kills the workers."""
        self._feeder.close()
        for worker in self._workers.values():
            worker.terminate()
        busy_at = dict.fromkeys(self._workers, time.monotonic())
        while not all(worker.gone() for worker in self._workers.values()):
            self._listen()
            self._keep(self._servers)
            states = self._stop_jobs()
            for name, worker in self._workers.items():
                horses = worker.children()
                if states is None:
                    for horse in horses:
                        horse.send(signal.SIGTERM)
                    busy = any(living_children(horse.pid) for horse in horses)
                else:
                    busy = QUEUES[name] in states
                if busy:
                    busy_at[name] = time.monotonic()
                patience_s = QUIET_PATIENCE_S if states is not None else BUSY_PATIENCE_S
                if self._stops_asked > 1 or time.monotonic() - busy_at[name] > patience_s:
                    worker.kill()
            self._manager.alive()
            self._wakeup.sleep(STOP_TICK_S)
        # A killed worker's horse dies a moment after it. The next daemon takes back the jobs that are not back by then.
        deadline = time.monotonic() + HORSE_PATIENCE_S
        with self._errors.of("taking the last jobs back", Exception):
            while self._store.jobs(*QUEUES.values()) and time.monotonic() < deadline:
                self._dispatcher.adopt(blameless=True)
                time.sleep(0.01)
        self._feeder.wait()

    def _stop_jobs(self) -> set[JobState] | None:
        """Stop the jobs that a process works on. Returns the states of these jobs, None when the database does not
        answer."""
        with self._errors.of("stopping the jobs", Exception):
            self._dispatcher.adopt(blameless=True)
            # Done at each tick, as a worker may have been about to take a job.
            rows = self._store.jobs(*QUEUES.values())
            for row in rows:
                self._store.stop(row.id, StopReason.SHUTDOWN)
            self._dispatcher.pass_on_stops()
            return {row.state for row in rows}
        return None

    def _end_servers(self) -> None:
        for server in self._servers:
            server.terminate()
        deadline = time.monotonic() + SERVER_PATIENCE_S
        while not all(server.gone() for server in self._servers):
            if time.monotonic() > deadline:
                for server in self._servers:
                    server.kill()
            time.sleep(0.01)

    def _listen(self) -> None:
        """Keep the API's sockets open. Jobs do not need them: when this fails, everything else goes on."""
        with self._errors.of("listening", Exception):
            self._api.keep()
        with self._errors.of(f"listening on {self._config.listen}", Exception):
            self._browsers.keep()

    def _keep_lock(self) -> None:
        with self._errors.of("keeping the lock", OSError):
            try:
                self._lock.keep()
            except UserError as error:  # the lock's file was deleted, and another daemon was faster than this tick
                log.error("%s", error)
                self._down_asked = True

    def _keep(self, children: Iterable[Child]) -> None:
        for child in children:
            with self._errors.of(f"keeping the {child.name}", Exception):
                child.keep()

    @property
    def _stops_asked(self) -> int:
        """The number of requests to stop. All requests through the API count as one, so that they alone never make the
        second request, which kills."""
        return self._signals + self._down_asked

    def _count_signal(self) -> None:
        self._signals += 1

    def _ask_down(self) -> None:
        self._down_asked = True
        self._wakeup.wake()

    def _health(self) -> dict[str, Any]:
        return {
            "api": API,
            "version": self._release,
            "state": "stopping" if self._stops_asked else "running",
            "process": str(Process.current()),
            "pid": os.getpid(),
            "started_at": self._started,
            "state_folder": str(self._paths.state),
            "children": {
                child.name: {"pid": child.pid, "restarts": child.restarts}
                for child in [*self._servers, *self._workers.values()]
            },
        }
