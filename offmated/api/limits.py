"""What a client may take of the daemon: bytes of a request, time to send it, connections, threads. What is more is
refused while it comes in, and nothing of it is kept."""

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
"""More than six bytes for each character of the longest job file (`planner.job.source`)."""
REQUEST_S = 20.0
"""To send a request in; answers may take longer."""
MOST_CONNECTIONS = 256
"""Connections are file descriptors, of which a process often has 1,024, and jobs need some. Where a process may have
fewer, connections take at most a quarter of them."""
MOST_STRANGERS = 32
"""Of these over TCP that have not shown the token. The oldest gives its place up to who comes after: whoever has the
token shows it at once, and nobody can keep them out by sitting there."""
WRITERS = 4
"""Requests that change jobs and are worked on at once. Others wait in line without a thread, so that there are threads
for those who only look."""
ADMIT = "admit"
TURN_S = 5.0
"""So long they wait, and then are asked to come again: with what the database waits it is less than a client waits."""


def most_connections() -> int:
    """How many this process takes."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if descriptors == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, descriptors // 4)


class Framed:
    """The application behind it gets requests of which it is beyond doubt where they end (RFC 9112, 6.1 and 6.3):
    whoever stands between the client and us may else take a part of one for the next one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        doubt = "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] == "1.0")
        await (_unframed() if doubt else self._app)(scope, receive, send)


class Limits:
    """The application behind it gets requests whose body is there, whole and small, and few at once that write."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # A server whose socket was deleted ends beside the new one, each with a loop of its own.
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
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
    """The body, or as much of it as shows that it is too large; None when the client went away."""
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
        "The request is too large.", code="request-too-large", exit_code=Exit.USAGE,
        numbers=(f"it {has}, at most {format_bytes(MOST_BODY_BYTES)} are taken",),
        hint="a job file names its data, it does not hold them",
    )  # fmt: skip
    return refused(413, error, headers={"connection": "close"})  # or the server would read the rest


def _unframed() -> ASGIApp:
    error = UserError(
        "The request gives its length twice.", code="request-unframed", exit_code=Exit.USAGE,
        numbers=("it has Transfer-Encoding beside Content-Length, or in HTTP/1.0",), hint="leave Transfer-Encoding out",
    )  # fmt: skip
    return refused(400, error, headers={"connection": "close"})


def _too_slow() -> ASGIApp:
    error = UserError(
        "The request did not come to its end.", code="request-too-slow", hint="send it again",
        numbers=(f"it was not there after {REQUEST_S:g} s",),
    )  # fmt: skip
    return refused(408, error, headers={"connection": "close"})


class Connection(H11Protocol):
    """One connection. It is closed when it sends no request for too long, and refused where there are too many."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Take it, or refuse it."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._unwatch()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """What has come in."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()  # the request is there, but for its body, which `Limits` waits for
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
    """A connection over TCP, where everybody can connect: a stranger's until `admit` is called, which the application
    finds in the state of each request."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.app_state = {**self.app_state, ADMIT: self.admit}
        self._came = next(_arrivals)
        self._is_stranger = True

    def admit(self) -> None:
        """Keep it: it has shown the token."""
        self._is_stranger = False

    def connection_made(self, transport: Any) -> None:
        """Take it, and let the oldest stranger go where there are too many."""
        super().connection_made(transport)
        strangers = [
            one for one in self.connections
            if isinstance(one, Stranger) and one._is_stranger and not one.transport.is_closing()
        ]  # fmt: skip
        if len(strangers) > MOST_STRANGERS:
            min(strangers, key=lambda one: one._came).transport.close()


_arrivals = itertools.count()
_TOO_MANY = (
    "HTTP/1.1 503 Service Unavailable\r\n"
    f"retry-after: {RETRY_AFTER_S}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
).encode()
