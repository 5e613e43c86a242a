"""The page that the daemon shows in a browser: `assets/` has its markup, style and scripts, and uPlot 1.6.32 (MIT).
Nothing here is private; what it shows it asks of the API, as any other client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import Response

FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "words.js": "text/javascript; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
#: Scripts and answers of this daemon only; nobody frames the page or learns where it is.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """The page at `/`, its parts below `/page/`."""
    for name, kind in FILES.items():
        path = "/" if name == "index.html" else f"/page/{name}"
        app.get(path, include_in_schema=False)(_sender(name, kind))


def _sender(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(files("offmated.api").joinpath("assets", name).read_bytes(), media_type=kind, headers=HEADERS)

    return send
