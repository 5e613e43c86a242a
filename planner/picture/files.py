"""Writes the pictures a person asked for."""

from __future__ import annotations

import json
from pathlib import Path

from planner.errors import Exit, UserError
from planner.picture.drawing import Drawing
from planner.picture.page import page
from planner.picture.trace import trace


def write_pictures(drawing: Drawing, *, trace_file: Path | None, html_file: Path | None) -> None:
    """Write a trace, a page, or both. Raises UserError (exit 2) for a file that cannot be written."""
    if trace_file is not None:
        _write(trace_file, json.dumps(trace(drawing), separators=(",", ":")) + "\n")
    if html_file is not None:
        _write(html_file, page(drawing))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise UserError(
            f"The file {path} cannot be written: {error.strerror}.", code="cannot-write", hint="name another file",
            exit_code=Exit.USAGE,
        ) from None  # fmt: skip
