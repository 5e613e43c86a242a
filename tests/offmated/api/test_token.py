"""The API over TCP: nobody without the token, and a cookie only to look."""

from __future__ import annotations

import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from offmated.api.addresses import TcpAddress
from offmated.api.limits import MOST_CONNECTIONS
from offmated.api.token import TICKET_S, Guarded, read_token
from offmated.config import Config
from offmated.paths import Paths
from planner.errors import Exit, UserError
from tests.support.daemons import House, house, until


@pytest.fixture(scope="module")
def shared() -> Iterator[House]:
    with house() as built:
        yield built


@pytest.fixture
def place(shared: House) -> tuple[str, str]:
    """The address, and the token."""
    address, token = shared.client.page_url().split("#")
    return address, token


def test_without_the_token_nobody_learns_anything(shared: House, place: tuple[str, str]) -> None:
    address, token = place
    assert address.startswith("http://127.0.0.1:")
    asked = [("GET", "health"), ("GET", "jobs"), ("POST", "shutdown"), ("POST", "page"), ("GET", "openapi.json")]
    another = f"{token[:-1]}{'x' if token[-1] != 'x' else 'y'}"
    tokens = f"Bearer {token[:-1]}", f"Bearer {token}x", f"Bearer {another}", f"Basic {token}", token
    for shown in ("", "Bearer", "Bearer ü", *tokens):
        for method, path in asked:
            answer = httpx.request(method, address + path, headers={"Authorization": shown.encode()})
            assert (answer.status_code, answer.json()["code"]) == (401, "no-token"), (shown, path)
    assert httpx.get(f"{address}health", params={"token": token}).status_code == 401, "addresses are written into logs"
    assert shared.client.health()["state"] == "running"


def test_with_the_token_it_is_the_api(shared: House, place: tuple[str, str]) -> None:
    address, token = place
    number = shared.submit("over TCP")
    with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {token}"}) as client:
        assert client.get("/health").json()["state"] == "running"
        assert client.get(f"/jobs/{number}").json()["name"] == "over TCP"
        assert client.post("/page").json() == {"url": f"{address}#{token}"}, "the same, however often it is asked for"
        shared.wait_for(number, "done")
        refused = client.post(f"/jobs/{number}/cancel")
        assert (refused.status_code, refused.json()["code"]) == (422, "job-ended")


def test_who_sits_there_without_the_token_keeps_nobody_out_who_has_it(shared: House, place: tuple[str, str]) -> None:
    address, token = place
    where = (httpx.URL(address).host, httpx.URL(address).port)
    with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {token}"}) as before, ExitStack() as stack:
        assert before.get("/health").status_code == 200
        (kept,) = connections(before)
        silent = [stack.enter_context(socket.create_connection(where)) for _ in range(MOST_CONNECTIONS + 50)]
        with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {token}"}) as after:
            assert after.get("/health").status_code == 200
        assert before.get("/health").status_code == 200
        assert connections(before) == [kept], "who has shown the token stays connected"
        for one in silent[:100]:
            one.settimeout(120)
            assert one.recv(1) == b"", "the first to sit there are the first to go"


def connections(client: httpx.Client) -> list[object]:
    """Those that a client keeps."""
    transport = client._transport
    assert isinstance(transport, httpx.HTTPTransport)
    return list(transport._pool.connections)


def test_a_ticket_opens_one_plan_for_a_minute(
    shared: House, place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, token = place
    number = shared.submit()
    shared.wait_for(number, "done")
    with httpx.Client(base_url=address) as stranger:
        assert stranger.post(f"/ticket?path=/jobs/{number}/plan.html").status_code == 401
        owner = {"Authorization": f"Bearer {token}"}
        for path in ("/jobs", "/shutdown", f"/jobs/{number}/plan.html/../../..", "//box/jobs/1/plan.html", ""):
            assert stranger.post("/ticket", params={"path": path}, headers=owner).status_code == 422
        link = stranger.post(f"/ticket?path=/jobs/{number}/plan.html", headers=owner).json()["url"]
        assert token not in link
        assert stranger.get(link).status_code != 401
        assert stranger.get(link.replace(f"/jobs/{number}/", f"/jobs/{number + 1}/")).status_code == 401
        assert stranger.get(link[:-1] + ("0" if link[-1] != "0" else "1")).status_code == 401
        assert stranger.get(link.replace("/plan.html", "")).status_code == 401
        assert stranger.post(link).status_code == 401
    guard = Guarded(no_app, token)
    scope = {"method": "GET", "path": f"/jobs/{number}/plan.html", "query_string": link.split("?")[1].encode()}
    assert guard._has_ticket(scope)
    later = time.time() + TICKET_S + 1
    monkeypatch.setattr("time.time", lambda: later)
    assert not guard._has_ticket(scope)


async def no_app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nobody is let through")


@pytest.mark.parametrize("text", [b"short", b"with a space in the middle of it", "zwölfundzwanzigzeichenlang".encode()])
def test_a_token_that_is_none_lets_nobody_in(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(text)
    with pytest.raises(UserError) as caught:
        read_token(tmp_path / "token")
    assert (caught.value.code, text.decode() in str(caught.value)) == ("bad-token", False)


def test_an_empty_token_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    made = read_token(tmp_path / "token")
    assert len(made) >= 40 and read_token(tmp_path / "token") == made


def test_a_daemon_whose_token_is_none_goes_on_without_tcp() -> None:
    with house() as built:
        built.down()
        built.paths.config.write_text('listen = "127.0.0.1:0"\n')
        built.paths.token.write_bytes("\xff zwölf".encode("latin-1"))
        built.up()
        built.wait_for(built.submit(), "done")
        with pytest.raises(UserError) as caught:
            built.client.page_url()
        assert caught.value.code == "bad-token"


def test_the_token_is_this_users_alone_and_stays(shared: House, place: tuple[str, str]) -> None:
    file = shared.paths.token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_token(file) == place[1] == file.read_text()
    assert place[1] not in shared.log()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert place[1].encode() not in process.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue


def test_nothing_listens_over_tcp_until_it_is_asked_for_or_set() -> None:
    with house() as built:
        assert not built.paths.token.exists()
        built.down()
        assert not built.paths.token.exists()
        (built.paths.config).write_text('listen = "127.0.0.1:0"\n')
        built.up()
        until(built.paths.token.exists, "it listens from the start")  # its own socket answers before that
        address, token = built.client.page_url().split("#")
        assert httpx.get(f"{address}health", headers={"Authorization": f"bearer {token}"}).status_code == 200
        built.down()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}health")


def test_the_pages_address_stays_unless_its_port_is_taken() -> None:
    with house() as built:
        address = built.client.page_url()
        built.down()
        built.up()
        assert built.client.page_url() == address
        built.down()
        port = int(built.paths.page_port.read_text())
        with socket.create_server(("127.0.0.1", port)):
            built.up()
            other = built.client.page_url()
            assert other != address and other.split("#")[1] == address.split("#")[1]
            assert built.paths.page_port.read_text() != f"{port}\n"


@pytest.mark.parametrize(
    "text", ["localhost:80", "127.0.0.1", ":80", "127.0.0.1:70000", "127.0.0.1:x", "::1:80", "1.2.3:4"]
)
def test_an_address_that_is_none_is_said(text: str, tmp_path: Path) -> None:
    paths = Paths.at(tmp_path)
    assert Config.load(paths, {"OFFMATE_LISTEN": text}).listen == text
    with pytest.raises(UserError) as caught:
        TcpAddress.parse(text)
    assert (caught.value.code, caught.value.exit_code) == ("bad-address", Exit.USAGE)


def test_addresses_are_written_as_urls_have_them() -> None:
    assert str(TcpAddress.parse("0.0.0.0:8477")) == "0.0.0.0:8477"
    assert str(TcpAddress.parse("[0:0::1]:8477")) == "[::1]:8477"
