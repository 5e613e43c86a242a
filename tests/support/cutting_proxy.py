"""A daemon's socket whose answers get lost: everything reaches the daemon, and the first answers do not come back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path


class Cutting:
    """Stands before `target` on `path`. The first `cut` connections are closed once the daemon has answered them."""

    def __init__(self, path: Path, target: Path, cut: int) -> None:
        self.requests: list[bytes] = []
        self._target = target
        self._cut = cut
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            with closing(client), closing(socket.socket(socket.AF_UNIX)) as daemon:
                daemon.connect(str(self._target))
                request = _message(client)
                self.requests.append(request)
                daemon.sendall(request)
                answer = _message(daemon)
                if self._cut > 0:
                    self._cut -= 1
                else:
                    client.sendall(answer)

    def close(self) -> None:
        """Listen no more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _message(connection: socket.socket) -> bytes:
    """One request or answer, whose body has a Content-Length."""
    said = b""
    while b"\r\n\r\n" not in said:
        said += connection.recv(65536)
    head, _, body = said.partition(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while lengths and len(body) < lengths[0]:
        piece = connection.recv(65536)
        said, body = said + piece, body + piece
    return said


@contextmanager
def cutting(path: Path, target: Path, cut: int) -> Iterator[Cutting]:
    """The socket, closed at the end."""
    with closing(Cutting(path, target, cut)) as built:
        yield built
