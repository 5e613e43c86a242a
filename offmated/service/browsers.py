"""Serves the API over TCP, for browsers and other machines: at the address in the settings, or at a port of this
machine alone once somebody asks for the page."""

from __future__ import annotations

import ipaddress
import threading
from contextlib import suppress
from pathlib import Path

from starlette.types import ASGIApp

from offmated.api.addresses import TcpAddress
from offmated.api.limits import Stranger
from offmated.api.server import Server
from offmated.api.token import Guarded, read_token


class Browsers:
    """The TCP server of the API, kept running. `listen`: the address in the settings, if there is one; without it
    nothing listens until `page` is called. `token`: the file with the token. `port`: the file that keeps the port which
    `page` opened last, so that the page's address stays the same. Raises UserError `bad-address`."""

    def __init__(self, app: ASGIApp, listen: str | None, token: Path, port: Path) -> None:
        self._app = app
        self._address = TcpAddress.parse(listen) if listen is not None else None
        self._file, self._port = token, port
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
        servers. Opens a port if none is open: the last one, or another if that is in use. Raises OSError where that
        fails."""
        with self._lock:
            if self._address is None:
                self._open()
            else:
                self._keep()
            assert self._address is not None
            host = ipaddress.ip_address(self._address.host)
            if host.is_unspecified:
                host = ipaddress.ip_address("127.0.0.1" if host.version == 4 else "::1")
            return f"http://{TcpAddress(str(host), self._address.port)}/#{self._token}"

    def close(self) -> None:
        """Stop listening."""
        with self._lock:
            if self._server is not None:
                self._server.close()

    def _open(self) -> None:
        self._address = TcpAddress("127.0.0.1", _read_port(self._port))
        try:
            self._keep()
        except OSError:
            self._address.port = 0
            self._keep()
        with suppress(OSError):  # on a full disk the next daemon may take another port
            self._port.write_text(f"{self._address.port}\n", "ascii")

    def _keep(self) -> None:
        if self._address is None:
            return
        if self._server is None:
            self._token = read_token(self._file)  # once: a later change of the file counts from the next start on
            self._server = Server(Guarded(self._app, self._token), self._address, Stranger)
        self._server.keep()


def _read_port(file: Path) -> int:
    """The port in `file`; 0, which stands for any free port, if it has none."""
    try:
        port = int(file.read_text("ascii"))
    except (OSError, ValueError):
        return 0
    return port if 1024 <= port <= 65535 else 0
