"""Serves the API over TCP, for browsers and other machines: at the address in the settings, or at a free port once
somebody asks for the page."""

from __future__ import annotations

import ipaddress
import threading
from pathlib import Path

from starlette.types import ASGIApp

from offmated.api.addresses import TcpAddress
from offmated.api.limits import Stranger
from offmated.api.server import Server
from offmated.api.token import Guarded, read_token


class Browsers:
    """The TCP server of the API, kept running. `listen`: the address in the settings, if there is one; without it
    nothing listens until `page` is called. `token`: the file with the token. Raises UserError `bad-address`."""

    def __init__(self, app: ASGIApp, listen: str | None, token: Path) -> None:
        self._app = app
        self._address = TcpAddress.parse(listen) if listen is not None else None
        self._file = token
        self._token = ""
        self._server: Server | None = None
        self._lock = threading.Lock()  # `page` is called in a thread of the API

    def keep(self) -> None:
        """Listen at the address in the settings, or at the one that `page` opened; called often, and does nothing while
        it listens. Raises OSError."""
        with self._lock:
            self._keep()

    def page(self) -> str:
        """The address for a browser on this machine, with the token behind a "#": browsers do not send that part to
        servers. Opens a port if none is open. Raises OSError where that fails."""
        with self._lock:
            self._address = self._address or TcpAddress("127.0.0.1", 0)
            self._keep()
            host = ipaddress.ip_address(self._address.host)
            if host.is_unspecified:
                host = ipaddress.ip_address("127.0.0.1" if host.version == 4 else "::1")
            return f"http://{TcpAddress(str(host), self._address.port)}/#{self._token}"

    def close(self) -> None:
        """Stop listening."""
        with self._lock:
            if self._server is not None:
                self._server.close()

    def _keep(self) -> None:
        if self._address is None:
            return
        if self._server is None:
            self._token = read_token(self._file)  # once: a later change of the file counts from the next start on
            self._server = Server(Guarded(self._app, self._token), self._address, Stranger)
        self._server.keep()
