"""The API's server, on an address and in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time

import uvicorn
from starlette.types import ASGIApp

from offmated.api.addresses import Address
from offmated.api.limits import Connection

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
BACKLOG = 128  # connections that the system holds, and that are taken at once, beyond those there may be


class Server:
    """Has `app` answer at `address`."""

    def __init__(self, app: ASGIApp, address: Address, connection: type[Connection] = Connection) -> None:
        self._app = app
        self._connection = connection
        self._address = address
        self._lock = threading.Lock()  # the daemon keeps it, and who asks for the page starts it
        self._running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def keep(self) -> None:
        """Start to listen; once more when the address has gone. Who is connected by then keeps the server there was,
        which ends after them. Raises OSError."""
        with self._lock:
            for server, _ in self._running[:-1]:
                server.should_exit |= not server.server_state.connections
            listens = bool(self._running) and self._running[-1][1].is_alive()
            self._running = [(server, thread) for server, thread in self._running if thread.is_alive()]
            if listens and self._address.is_there():
                return
            listener = self._address.listen()
            settings = uvicorn.Config(
                self._app, http=self._connection, ws="none", backlog=BACKLOG, log_config=None, access_log=False,
                lifespan="off", timeout_graceful_shutdown=int(PATIENCE_S), proxy_headers=False,
                workers=1,  # or uvicorn reads the number from a variable that is other servers', and may be none
            )  # fmt: skip
            server = uvicorn.Server(settings)  # which closes its listener
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="api")
            thread.start()
            if self._running:
                log.warning("%s was deleted: listens anew", self._address)
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
        self._address.clear()
