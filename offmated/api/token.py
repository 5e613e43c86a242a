"""Who may ask over TCP, where every user of the machine, or of the network, can connect: who has the token."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from offmated.api.refusals import refused
from planner.errors import Exit, UserError

COOKIE = "offmate-token"
SCHEME = "bearer "


def read_token(file: Path) -> str:
    """The token in `file`, which is made, for this user alone, where there is none."""
    try:
        return file.read_text("ascii").strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(32)
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(token)
        draft.replace(file)
        return token


class Guarded:
    """The application for those who show the token: as `Authorization: Bearer …`, or, to look only, as the cookie that
    the page sets for its links. A cookie alone changes nothing: other pages can have a browser send it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it with 401."""
        if scope["type"] != "http" or self._open(scope) or self._shown(scope):
            await self._app(scope, receive, send)
            return
        error = UserError(
            "This needs the daemon's token.", code="no-token", exit_code=Exit.USAGE,
            hint="offmate page gives an address that has it",
        )  # fmt: skip
        await refused(401, error, headers={"www-authenticate": "Bearer"})(scope, receive, send)

    def _open(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return scope["method"] in ("GET", "HEAD") and (path in ("/", "/healthz") or path.startswith("/page/"))

    def _shown(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        said = headers.get("authorization", "")
        if said[: len(SCHEME)].lower() == SCHEME:
            return self._is(said[len(SCHEME) :].strip())
        return scope["method"] in ("GET", "HEAD") and self._is(cookie_parser(headers.get("cookie", "")).get(COOKIE, ""))

    def _is(self, shown: str) -> bool:
        return secrets.compare_digest(shown.encode("utf-8", "replace"), self._token)
