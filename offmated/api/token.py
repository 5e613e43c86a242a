"""Lets only clients with the token use the API over TCP, where every user of the machine or network can connect."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from pathlib import Path

from starlette.datastructures import Headers, QueryParams
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from offmated.api.limits import ADMIT
from offmated.api.refusals import refused
from planner.errors import Exit, UserError

SCHEME = "bearer "
TICKET_S = 60
"""How long a link may be opened."""
_LINKED = re.compile(r"/jobs/[0-9]{1,10}/plan\.html")
_TOKEN = re.compile(r"[!-~]{20,}")


def read_token(file: Path) -> str:
    """The token in `file`. If there is no file, one with a new token is made that other users cannot read. Raises
    UserError `bad-token` for a token that could be guessed or cannot be sent, and OSError."""
    try:
        token = file.read_bytes().strip().decode("ascii", "replace")
    except FileNotFoundError:
        token = ""
    if _TOKEN.fullmatch(token):
        return token
    if token:
        raise UserError(
            "The API token is too easy to guess, or has characters that cannot be sent.",
            numbers=(str(file),),
            code="bad-token",
            hint="delete the file: another is made at the daemon's start",
            exit_code=Exit.USAGE,
        )
    token = secrets.token_urlsafe(32)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(token)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(file)
    return token


class Guarded:
    """ASGI middleware that passes on only requests with the token in the header `Authorization: Bearer …`. A cookie is
    not accepted: a browser sends cookies to every port of a host, and for every page that asks.

    A link cannot send a header. So `POST /ticket?path=/jobs/3/plan.html` gives a client with the token an address that
    shows this plan, and nothing else, to whoever opens it within a minute."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it with 401."""
        shown = scope["type"] == "http" and self._is_shown(scope)
        if shown and (admit := scope.get("state", {}).get(ADMIT)):
            admit()
        if scope["type"] != "http" or _is_open(scope) or self._has_ticket(scope):
            await self._app(scope, receive, send)
        elif not shown:
            error = UserError(
                "This needs the daemon's token.",
                code="no-token",
                exit_code=Exit.USAGE,
                hint="offmate page gives an address that has it",
            )
            await refused(401, error, headers={"www-authenticate": "Bearer"})(scope, receive, send)
        elif scope["path"] == "/ticket" and scope["method"] == "POST":
            await self._give_ticket(scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _give_ticket(self, scope: Scope) -> JSONResponse:
        path = QueryParams(scope["query_string"]).get("path", "")
        if not _LINKED.fullmatch(path):
            return refused(422, UserError("There is no link to that.", code="bad-request", exit_code=Exit.USAGE))
        until = str(int(time.time()) + TICKET_S)
        return JSONResponse({"url": f"{path}?until={until}&ticket={self._ticket(path, until)}"})

    def _has_ticket(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if scope["method"] != "GET" or not _LINKED.fullmatch(path):
            return False
        query = QueryParams(scope["query_string"])
        until, shown = query.get("until", ""), query.get("ticket", "")
        if not re.fullmatch("[0-9]{1,12}", until) or int(until) < time.time():
            return False
        return hmac.compare_digest(shown.encode("utf-8", "replace"), self._ticket(path, until).encode())

    def _ticket(self, path: str, until: str) -> str:
        return hmac.new(self._token, f"{path} until {until}".encode(), hashlib.sha256).hexdigest()

    def _is_shown(self, scope: Scope) -> bool:
        header = Headers(scope=scope).get("authorization", "")
        token = header[len(SCHEME) :].strip(" ").encode("utf-8", "replace")
        return header[: len(SCHEME)].lower() == SCHEME and hmac.compare_digest(token, self._token)


def _is_open(scope: Scope) -> bool:
    """Whether a request asks for what is not secret: the files of the page, and whether the daemon answers."""
    path: str = scope["path"]
    return scope["method"] in ("GET", "HEAD") and (path in ("/", "/healthz") or path.startswith("/page/"))
