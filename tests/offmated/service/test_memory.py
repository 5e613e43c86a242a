"""What clients ask for leaves no mark on the daemon's memory: a real daemon, looked at from outside."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.support.daemons import House, house

ROOM_BYTES = 48 * 2**20  # of a process that takes 100 MiB: threads, caches, what the allocator keeps


@pytest.fixture(scope="module")
def shared() -> Iterator[House]:
    with house() as built:
        built.wait_for(built.submit("warm", steps=1), "done")
        yield built


def resident(built: House) -> int:
    assert built.daemon is not None
    return int(psutil.Process(built.daemon.pid).memory_info().rss)


@pytest.mark.parametrize("declared", [True, False])
def test_a_refused_body_of_400_mib_leaves_no_mark(shared: House, declared: bool) -> None:
    before = resident(shared)
    pieces = 400
    transport = httpx.HTTPTransport(uds=str(shared.paths.api_socket))
    headers = {"content-length": str(pieces * 2**20)} if declared else {}

    def body() -> Iterator[bytes]:
        for _ in range(pieces):
            yield 2**20 * b"#"

    with httpx.Client(transport=transport, base_url="http://offmated", timeout=120) as client:
        for path in ("/jobs", "/jobs/1/retry", "/jobs/1/cancel"):
            answer = client.post(path, content=body(), headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (413, "request-too-large")
            assert resident(shared) - before < ROOM_BYTES


def test_events_of_a_long_run_come_piece_by_piece(shared: House) -> None:
    event = {"event": "step", "step": 1, "loss": 1.0, "tokens": 64, "time": 0.0, "padding": 200 * "x"}
    line = json.dumps(event).encode() + b"\n"
    count = 64 * 2**20 // len(line)
    (shared.paths.run_folder(1) / "metrics.jsonl").write_bytes(count * line)
    before = resident(shared)
    told, position, most = 0, 0, 0
    while True:
        piece = shared.client.events(1, position)
        events, end = piece.events, piece.position
        if end == position:
            break
        told, position, most = told + len(events), end, max(most, len(events))
    assert told == count
    assert most < count / 50
    assert resident(shared) - before < ROOM_BYTES
