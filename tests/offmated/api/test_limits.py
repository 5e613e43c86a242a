"""What a client may take of the daemon: the real server on its socket, and clients that ask for too much."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from offmated.api import limits
from offmated.api.limits import MOST_BODY_BYTES
from planner.keys.source import MOST_CHARACTERS
from tests.support.daemons import until
from tests.support.served import JOB, Served, served


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served() as built:
        yield built


def said(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    pieces = []
    with suppress(ConnectionResetError):  # it had not read all that was sent
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def status_and_fields(answer: bytes) -> tuple[int, dict[str, object]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body else {}


def works(served: Served) -> bool:
    return bool(served.client.health()["state"] == "running")


def test_a_body_that_says_it_is_too_large_is_not_read(shared: Served) -> None:
    with shared.connect() as client:
        client.sendall(b"POST /jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 419430400\r\n\r\n")
        status, fields = status_and_fields(said(client))
    assert (status, fields["code"]) == (413, "request-too-large")
    assert fields["numbers"] == ["it has 400.0 MiB, at most 2.0 MiB are taken"]


@pytest.mark.parametrize("path", ["/jobs", "/jobs/1/retry", "/shutdown", "/nowhere"])
def test_a_body_that_grows_too_large_is_cut_off(shared: Served, path: str) -> None:
    piece = 65536 * b"x"
    sent = 0
    with shared.connect() as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 2**30:
                client.sendall(b"10000\r\n" + piece + b"\r\n")
                sent += len(piece)
        status, fields = status_and_fields(said(client))
    assert sent < 2 * MOST_BODY_BYTES
    assert (status, fields["code"]) == (413, "request-too-large")
    assert "shut_down" not in shared.calls


def test_the_longest_job_fits_a_request_however_it_is_written(shared: Served) -> None:
    comment = "# " + (MOST_CHARACTERS - len(JOB) - 3) * "\u00e9" + "\n"
    body = json.dumps({"yaml": comment + JOB, "folder": str(shared.folder)}).encode()  # six bytes for each letter
    assert MOST_CHARACTERS * 5.9 < len(body) < MOST_BODY_BYTES
    assert shared.client.submit(comment + JOB, str(shared.folder))["state"] == "submitted"
    with shared.connect() as client:
        head = f"POST /jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        client.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        assert status_and_fields(said(client))[0] == 201


def after_an_answer(client: socket.socket) -> socket.socket:
    """A connection that has been served, and is kept."""
    client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200")
    return client


@pytest.mark.sweep(3)
@pytest.mark.parametrize("served_before", [False, True])
@pytest.mark.parametrize("beginning", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_who_sends_no_request_in_time_is_let_go(
    shared: Served, monkeypatch: pytest.MonkeyPatch, beginning: bytes, served_before: bool
) -> None:
    with shared.connect() as client:
        if served_before:
            after_an_answer(client)
        monkeypatch.setattr(limits, "REQUEST_S", 0.2)
        if served_before:
            after_an_answer(client)  # the time for a third request begins only now
        with client if served_before else shared.connect() as watched:
            watched.sendall(beginning)
            assert said(watched) == b""


def test_a_body_that_does_not_come_is_not_waited_for(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with shared.connect() as client:
        after_an_answer(client)
        monkeypatch.setattr(limits, "REQUEST_S", 0.2)
        client.sendall(b"POST /jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        status, fields = status_and_fields(said(client))
    assert (status, fields["code"]) == (408, "request-too-slow")


def test_an_answer_may_take_longer_than_its_request(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    number = shared.client.submit(JOB, str(shared.folder))["id"]
    file = shared.paths.run_folder(number) / "log.txt"
    file.write_text("first\n")
    monkeypatch.setattr(limits, "REQUEST_S", 1.0)
    log = shared.client.logs(number, follow=True)
    assert next(log) == "first\n"
    time.sleep(1.5)
    monkeypatch.undo()
    file.write_text("first\nsecond\n")
    shared.client.cancel(number)
    assert "".join(log) == "second\n"


def test_more_connections_than_there_may_be_are_refused_and_later_taken(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_CONNECTIONS", 8)
    with ExitStack() as stack:
        first = stack.enter_context(shared.connect())
        for _ in range(20):
            stack.enter_context(shared.connect())
        with shared.connect() as late:
            answer = said(late)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1\r\n" in answer
        first.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert said(first).startswith(b"HTTP/1.1 200"), "who is connected is served"
    until(lambda: works(shared), "there is room again")


@pytest.mark.parametrize(
    ("version", "more"), [("1.1", "Content-Length: 4\r\n"), ("1.0", "")], ids=["both", "a version without it"]
)
@pytest.mark.parametrize("path", ["/jobs", "/nowhere"])
def test_a_request_whose_end_is_in_doubt_is_refused_and_nothing_behind_it_is_heard(
    shared: Served, path: str, version: str, more: str
) -> None:
    hidden = "POST /shutdown HTTP/1.1\r\nHost: x\r\n\r\n"
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\n{more}Transfer-Encoding: chunked\r\n\r\n"
    with shared.connect() as client:
        client.sendall(f"{head}0\r\n\r\n{hidden}".encode())
        status, fields = status_and_fields(said(client))
    assert (status, fields["code"]) == (400, "request-unframed")
    assert "shut_down" not in shared.calls


def test_a_process_of_few_descriptors_takes_a_quarter_of_them(shared: Served) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limits.most_connections() == min(256, before[0] // 4)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        assert limits.most_connections() == 64
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
