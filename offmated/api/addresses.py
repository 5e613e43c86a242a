"""Defines the addresses at which the API listens: a socket file of this user, and TCP where somebody asked for it."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from planner.errors import Exit, UserError


class Address(Protocol):
    """An address at which the API's server listens. `listen` raises OSError."""

    def listen(self) -> socket.socket:
        """Open a socket that listens at this address, and return it."""
        ...

    def is_there(self) -> bool:
        """Whether clients can still reach the socket that was opened last; a socket file may have been deleted."""
        ...

    def clear(self) -> None:
        """Remove what `listen` created on disk."""
        ...


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket file, which only this user can use."""

    path: Path

    def listen(self) -> socket.socket:
        """Open a socket that listens at this file. The file and its folder are made again if they were deleted, as
        happens when the user logs out."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the daemon's umask closes the parents, too
        self.path.unlink(missing_ok=True)
        # Not uvicorn's own `uds`: it opens the socket to every user.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self.path))
            self.path.chmod(0o600)
            listener.listen()
        except OSError:
            listener.close()
            raise
        return listener

    def is_there(self) -> bool:
        """Whether the socket file exists."""
        return self.path.is_socket()

    def clear(self) -> None:
        """Remove the socket file."""
        if self.path.is_socket():
            self.path.unlink()

    def __str__(self) -> str:
        return str(self.path)


@dataclass(slots=True)
class TcpAddress:
    """A TCP address: an IP address and a port. Port 0 becomes the port that the system chooses at the first
    `listen`."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> TcpAddress:
        """Parse a text like `127.0.0.1:8477` or `[::1]:8477`. Raises UserError for host names: a name may stand for
        several addresses, and one of them may be reachable from the whole world."""
        match = re.fullmatch(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<four>[0-9.]+)):(?P<port>[0-9]{1,5})", text)
        try:
            if match is None or int(match["port"]) > 65535:
                raise ValueError
            host = str(ipaddress.ip_address(match["six"] or match["four"]))
        except ValueError:
            raise UserError(
                "The address to listen on is not valid.",
                numbers=(f'listen = "{text}"',),
                code="bad-address",
                hint="an address and a port: 127.0.0.1:8477",
                exit_code=Exit.USAGE,
            ) from None
        return cls(host, int(match["port"]))

    def listen(self) -> socket.socket:
        """Open a socket that listens at this address and port, and return it."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.create_server((self.host, self.port), family=family)
        self.port = listener.getsockname()[1]
        return listener

    def is_there(self) -> bool:
        """Return True: unlike a socket file, a TCP port cannot be deleted."""
        return True

    def clear(self) -> None:
        """Do nothing: `listen` creates nothing on disk."""

    def __str__(self) -> str:
        """As it stands in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
