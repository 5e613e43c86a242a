"""Writes a plan's drawing as one self-contained HTML page: it needs no server, no network and no second file."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from planner.picture.document import document
from planner.picture.drawing import Drawing
from planner.units import printable

_TEMPLATE = Path(__file__).parent / "template"
_SCRIPTS = ("data", "words", "view", "chart", "hover", "figures", "table", "main")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def page(drawing: Drawing) -> str:
    """The HTML page that shows the plan in `drawing`, as text."""
    parts = {
        "title": html.escape(printable(drawing.title or "A plan")),
        "style": _read("page.css"),
        "script": "\n".join(_read(f"{name}.js") for name in _SCRIPTS),
        # "</script>" in a name would end the element; in JSON "\u003c" is the same character.
        "data": json.dumps(document(drawing), separators=(",", ":")).replace("<", "\\u003c"),
    }
    return _PLACE.sub(lambda match: parts[match[1]], _read("page.html"))


def _read(name: str) -> str:
    return (_TEMPLATE / name).read_text("utf-8")
