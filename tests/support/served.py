"""The API on its socket over a real database, without the daemon's other processes: jobs are taken in and stay where
they are."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from offmated.api.addresses import UnixAddress
from offmated.api.app import Services, make_app
from offmated.api.server import Server
from offmated.cli.client import Client
from offmated.jobs.database import PATIENCE_S
from offmated.jobs.migrate import upgrade
from offmated.jobs.store import Store
from offmated.paths import Paths
from planner.run.processes import Process

JOB = "model: ./model\ndataset: text.jsonl\n"


@dataclass(frozen=True)
class Served:
    """A served store. `folder` has a model and data for `JOB`."""

    folder: Path
    paths: Paths
    store: Store
    calls: list[str] = field(default_factory=list)

    @property
    def client(self) -> Client:
        """A client of its own."""
        return Client(self.paths)

    def connect(self) -> socket.socket:
        """A connection, to say anything on."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(120)
        connection.connect(str(self.paths.api_socket))
        return connection


@contextmanager
def served(*, patience_s: float = PATIENCE_S) -> Iterator[Served]:
    """A server whose database is waited for that long, ended at the end."""
    home = Path(tempfile.mkdtemp(prefix="offmate-", dir="/tmp"))  # sockets have short paths
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text('{"model_type": "llama"}')
    (home / "model" / "tokenizer.json").write_text("{}")
    (home / "text.jsonl").write_text('{"text": "one"}\n' * 8)
    paths = Paths.at(home / "state")
    paths.create()
    store = Store(f"sqlite:///{paths.database}", patience_s=patience_s)
    upgrade(store.engine, paths)
    built = Served(folder=home, paths=paths, store=store)
    services = Services(
        store=store,
        paths=paths,
        wake=lambda: built.calls.append("wake"),
        shut_down=lambda: built.calls.append("shut_down"),
        closing=lambda: False,
        health=lambda: {"state": "running", "process": str(Process.current())},
        page=lambda: "http://here/#token",
    )
    try:
        with closing(Server(make_app(services), UnixAddress(paths.api_socket))) as server:
            server.keep()
            yield built
    finally:
        store.engine.dispose()
        shutil.rmtree(home)
