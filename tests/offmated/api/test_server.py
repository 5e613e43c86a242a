"""The API's server by itself."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from contextlib import closing
from pathlib import Path

from fastapi import FastAPI

from offmated.api.addresses import UnixAddress
from offmated.api.server import Server
from tests.support.daemons import until


def answer(client: socket.socket) -> bytes:
    client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    said = b""
    while not said.endswith(b"}"):
        piece = client.recv(4096)
        assert piece, "the connection was closed"
        said += piece
    return said


def test_a_server_whose_folders_are_deleted_listens_anew_and_ends_after_those_connected() -> None:
    def servers() -> int:
        return sum(thread.name == "api" for thread in threading.enumerate())

    home = tempfile.TemporaryDirectory(prefix="offmate-", dir="/tmp")
    path = Path(home.name) / "user" / "offmate" / "api.sock"
    with home, closing(Server(FastAPI(), UnixAddress(path))) as server:
        server.keep()
        with socket.socket(socket.AF_UNIX) as early, socket.socket(socket.AF_UNIX) as late:
            early.connect(str(path))
            assert answer(early).startswith(b"HTTP/1.1 404")
            shutil.rmtree(path.parent.parent)
            for _ in range(3):
                server.keep()
            assert servers() == 2
            late.connect(str(path))
            for client in (early, late):
                assert answer(client).startswith(b"HTTP/1.1 404"), "who is connected stays so"

        def one_is_left() -> bool:
            server.keep()
            return servers() == 1

        until(one_is_left, "the first server has ended")
        assert path.is_socket()
        server.close()
        assert (servers(), path.exists()) == (0, False)
