"""Serves the daemon's page for browsers. `assets/` has its markup, style and scripts, and uPlot 1.6.32 (MIT). None of
these files is private: the page asks the API for what it shows, like any client."""

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
    **dict.fromkeys(
        (
            "api.js",
            "charts.js",
            "compare.js",
            "dom.js",
            "keys.js",
            "page.js",
            "places.js",
            "submit.js",
            "words.js",
        ),
        "text/javascript; charset=utf-8",
    ),
}
#: The page takes scripts and answers only from this daemon; no other page may frame it or learn its address.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Add the routes of the browser page to `app`: the page at `/`, and its scripts and styles below `/page/`."""
    for name, kind in FILES.items():
        path = "/" if name == "index.html" else f"/page/{name}"
        app.get(path, include_in_schema=False)(_sender(name, kind))


def _sender(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(files("offmated.api").joinpath("assets", name).read_bytes(), media_type=kind, headers=HEADERS)

    return send
