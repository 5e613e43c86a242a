"""Runs the API's server, on an address and in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from offmated.api.addresses import Address
from offmated.api.limits import Connection, Framed
from offmated.api.refusals import SHORT_FOR_NOW
from offmated.repeated_errors import RepeatedErrors
from planner.errors import first_line, is_out_of_memory

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
QUIET_S = 5.0  # without a refusal; asyncio tries again after 1 s
BACKLOG = 128  # connections that the system holds until they are taken, beyond the most that may be open


class _Listening(uvicorn.Server):
    """Logs once when the system gives no more connections, or no memory for them, and how often that happened when it
    does again. asyncio would log each try, some hundred times a second."""

    def __init__(self, settings: uvicorn.Config, address: str) -> None:
        super().__init__(settings)
        self._address = address
        self._refused = 0
        self._quiet: asyncio.TimerHandle | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening on the server's sockets."""
        asyncio.get_running_loop().set_exception_handler(self._told)
        await super().startup(sockets)

    def _told(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        short = isinstance(error, OSError) and error.errno in SHORT_FOR_NOW and "socket" in context
        if error is None or not (short or is_out_of_memory(error)):
            loop.default_exception_handler(context)
            return
        if self._quiet is None:
            log.warning("%s takes no more connections for now: %s", self._address, first_line(error))
        else:
            self._quiet.cancel()
        self._refused += 1
        self._quiet = loop.call_later(QUIET_S, self._again)

    def _again(self) -> None:
        log.info("%s takes connections again; %d tries were in vain", self._address, self._refused)
        self._refused, self._quiet = 0, None


class Server:
    """Serves the API `app` at `address`, in a thread of its own."""

    def __init__(self, app: ASGIApp, address: Address, connection: type[Connection] = Connection) -> None:
        self._app = Framed(app)
        self._connection = connection
        self._address = address
        self._lock = threading.Lock()  # the daemon keeps the server up, and a request for the page may start it
        self._errors = RepeatedErrors()
        self._running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def keep(self) -> None:
        """Start listening; called often, and listens again with a new server when the address is gone, as after the
        socket file was deleted. Clients connected to the old server keep it, and it ends after them. Raises OSError."""
        with self._lock:
            for server, _ in self._running[:-1]:
                server.should_exit |= not server.server_state.connections
            listens = bool(self._running) and self._running[-1][1].is_alive()
            self._running = [(server, thread) for server, thread in self._running if thread.is_alive()]
            if listens and self._address.is_there():
                return
            listener = self._address.listen()
            settings = uvicorn.Config(
                self._app,
                http=self._connection,
                ws="none",
                backlog=BACKLOG,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=int(PATIENCE_S),
                proxy_headers=False,
                workers=1,  # or uvicorn reads it from a variable meant for other servers, which may be no number
            )
            server = _Listening(settings, f"{self._address}")  # it closes the listener
            thread = threading.Thread(target=self._serve, args=(server, listener), name="api")
            try:
                thread.start()
            except RuntimeError:
                listener.close()
                raise
            if self._running:
                log.warning("%s was deleted: listens anew", self._address)
            self._running.append((server, thread))

    def _serve(self, server: uvicorn.Server, listener: socket.socket) -> None:
        with self._errors.of(f"answering at {self._address}", Exception):
            server.run(sockets=[listener])

    def close(self) -> None:
        """Finish the answers under way, and end the server. An answer that takes more than some seconds is not waited
        for."""
        for server, _ in self._running:
            server.should_exit = True
        deadline = time.monotonic() + 2 * PATIENCE_S
        for _, thread in self._running:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("an answer of the API was still being made, and is given up")
        self._address.clear()
