"""The API's server, on its socket and in a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from offmated.api.limits import Connection

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
BACKLOG = 128  # connections that the system holds, and that are taken at once, beyond those there may be


class Server:
    """Listens on the socket `path`, for this user alone."""

    def __init__(self, app: FastAPI, path: Path) -> None:
        self._app = app
        self._path = path
        self._running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def keep(self) -> None:
        """Start to listen; once more when the socket has been deleted, or its folder, as at a logout. Who is connected
        by then keeps the server there was, which ends after them. Raises OSError."""
        for server, _ in self._running[:-1]:
            server.should_exit |= not server.server_state.connections
        listens = bool(self._running) and self._running[-1][1].is_alive()
        self._running = [(server, thread) for server, thread in self._running if thread.is_alive()]
        if listens and self._path.is_socket():
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # parents as the daemon's umask has it: closed
        self._path.unlink(missing_ok=True)
        # Not uvicorn's own `uds`: it opens the socket to every user.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))
            self._path.chmod(0o600)
            listener.listen()
        except OSError:
            listener.close()
            raise
        settings = uvicorn.Config(
            self._app, http=Connection, ws="none", backlog=BACKLOG, log_config=None, access_log=False, lifespan="off",
            timeout_graceful_shutdown=int(PATIENCE_S),
            workers=1,  # or uvicorn reads the number from a variable that is other servers', and may be none
        )  # fmt: skip
        server = uvicorn.Server(settings)  # which closes its listener
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="api")
        thread.start()
        if self._running:
            log.warning("%s was deleted: listens anew", self._path)
        self._running.append((server, thread))

    def close(self) -> None:
        """Answer what was asked, and end, within some seconds: an answer that takes longer is not waited for."""
        for server, _ in self._running:
            server.should_exit = True
        deadline = time.monotonic() + 2 * PATIENCE_S
        for _, thread in self._running:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("an answer of the API was still being made, and is given up")
        if self._path.is_socket():
            self._path.unlink()
