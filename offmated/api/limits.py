"""Limits how much clients may use of the daemon: the bytes of a request, the time to send it, connections, threads. A
request above a limit is refused while it arrives, and nothing of it is kept."""

from __future__ import annotations

import asyncio
import itertools
import resource
from typing import Any
from weakref import WeakKeyDictionary

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from offmated.api.refusals import RETRY_AFTER_S, busy, refused
from planner.errors import Exit, UserError
from planner.units import format_bytes

MOST_BODY_BYTES = 2**21
"""The most bytes of a request's body: more than six for each character of the longest job file
(`planner.keys.source`)."""
REQUEST_S = 20.0
"""The seconds that a client has to send a request; answers may take longer."""
MOST_CONNECTIONS = 256
"""The most connections at a time. Each takes a file descriptor. A process often may have 1,024, and jobs need some of
them. Where the limit is low, connections take at most a quarter of it."""
MOST_STRANGERS = 32
"""The most TCP connections at a time whose clients have not shown the token. A new one takes the place of the oldest:
clients with the token show it at once, so nobody can keep them out by holding connections open."""
WRITERS = 4
"""The most requests that change jobs and are handled at the same time. Others wait in line without a thread, so that
threads are left for requests that only look."""
ADMIT = "admit"
TURN_S = 5.0
"""The seconds for which requests that change jobs wait in line before their clients are asked to try again. Together
with the wait for the database this is less than a client waits."""


def most_connections() -> int:
    """The number of connections that the API accepts at a time, by the number of files that this process may open."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if descriptors == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, descriptors // 4)


class Framed:
    """ASGI middleware that passes on only requests whose end is beyond doubt (RFC 9112, 6.1 and 6.3). With others, a
    proxy between the client and the API may take a part of one request for the next one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI), or refuse it where its end is in doubt."""
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        doubt = "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] == "1.0")
        await (_unframed() if doubt else self._app)(scope, receive, send)


class Limits:
    """ASGI middleware that passes on only requests whose body has arrived whole and is small, and at most `WRITERS`
    requests at once that change jobs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # By event loop: a server whose socket was deleted runs on beside the new one, each with its own loop.
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI), or refuse it where it is too large or too many are waiting."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        writes = scope["method"] == "POST" and scope["path"].startswith(("/jobs", "/machine"))
        turns = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(WRITERS))
        try:
            if writes:
                await asyncio.wait_for(turns.acquire(), TURN_S)
        except TimeoutError:
            await busy(f"{WRITERS} requests were worked on for {TURN_S:g} s")(scope, receive, send)
            return
        try:
            await self._answer(scope, receive, send)
        finally:
            if writes:
                turns.release()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > MOST_BODY_BYTES:
            await _too_large(int(declared))(scope, receive, send)
            return
        try:
            async with asyncio.timeout(REQUEST_S):
                body = await _body(receive)
        except TimeoutError:
            await _too_slow()(scope, receive, send)
            return
        if body is None:  # the client has gone
            return
        if len(body) > MOST_BODY_BYTES:
            await _too_large(None)(scope, receive, send)
            return
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replayed, send)


async def _body(receive: Receive) -> bytes | None:
    """The body, or so much of it that it is too large; None when the client went away."""
    body = bytearray()
    while len(body) <= MOST_BODY_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return bytes(body)


def _too_large(size: int | None) -> ASGIApp:
    has = f"has {format_bytes(size)}" if size is not None else "has more"
    error = UserError(
        "The request is too large.",
        code="request-too-large",
        exit_code=Exit.USAGE,
        numbers=(f"it {has}, at most {format_bytes(MOST_BODY_BYTES)} are taken",),
        hint="a job file names its data, it does not hold them",
    )
    return refused(413, error, headers={"connection": "close"})  # or the server would read the rest


def _unframed() -> ASGIApp:
    error = UserError(
        "The request gives its length twice.",
        code="request-unframed",
        exit_code=Exit.USAGE,
        numbers=("it has Transfer-Encoding beside Content-Length, or in HTTP/1.0",),
        hint="leave Transfer-Encoding out",
    )
    return refused(400, error, headers={"connection": "close"})


def _too_slow() -> ASGIApp:
    error = UserError(
        "The request did not come to its end.",
        code="request-too-slow",
        hint="send it again",
        numbers=(f"it was not there after {REQUEST_S:g} s",),
    )
    return refused(408, error, headers={"connection": "close"})


class Connection(H11Protocol):
    """The server side of one client connection. It is closed when no request arrives for too long, and refused where
    there are too many connections."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Accept a new connection, or refuse it where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting this connection, which has ended."""
        self._unwatch()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle the bytes that have arrived, and note when the present request began."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()  # the request's head is there; `Limits` waits for its body
        else:
            self._watch()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(REQUEST_S, self._close)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


class Stranger(Connection):
    """A connection over TCP, where everybody can connect. It counts as a stranger's until its client has shown the
    token and the application calls `admit`, which it finds in the state of each request."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.app_state = {**self.app_state, ADMIT: self.admit}
        self._came = next(_arrivals)
        self._is_stranger = True

    def admit(self) -> None:
        """Stop counting this connection as a stranger's: its client has shown the token."""
        self._is_stranger = False

    def connection_made(self, transport: Any) -> None:
        """Accept a new connection, and close the oldest stranger's connection where there are too many."""
        super().connection_made(transport)
        strangers = [
            connection
            for connection in self.connections
            if isinstance(connection, Stranger) and connection._is_stranger and not connection.transport.is_closing()
        ]
        if len(strangers) > MOST_STRANGERS:
            min(strangers, key=lambda connection: connection._came).transport.close()


_arrivals = itertools.count()
_TOO_MANY = (
    "HTTP/1.1 503 Service Unavailable\r\n"
    f"retry-after: {RETRY_AFTER_S}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
).encode()
