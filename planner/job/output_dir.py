"""Where a trained model goes: a folder that is free, or holds what the same run wrote before. Light: no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from planner.errors import Exit, UserError

MARK = "offmate.json"
"""The file in a model folder that names the run it is of, under "run"."""


def check_place(folder: Path, run: str | None = None) -> None:
    """Raise UserError unless a model can go to `folder`, an absolute path.

    It must not be there, be empty, or hold an earlier output of the run named `run`; and it must be possible to make
    it.
    """
    try:
        if folder.exists() and not (folder.is_dir() and (_is_of(run, folder) or not any(folder.iterdir()))):
            raise UserError(
                f"The output folder {folder} is not empty.", code="output-exists", exit_code=Exit.USAGE,
                hint="give another output_dir, or move what is there",
            )  # fmt: skip
        parent = next(parent for parent in folder.parents if parent.exists())
        reason = "not a folder" if not parent.is_dir() else "no permission to write there"
        fit = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
    except OSError as error:
        parent, reason, fit = folder, str(error.strerror), False
    if not fit:
        raise UserError(
            f"The output folder {folder} cannot be made.", code="output-unwritable", exit_code=Exit.USAGE,
            numbers=(f"{parent}: {reason}",), hint="give another output_dir",
        )  # fmt: skip


def _is_of(run: str | None, folder: Path) -> bool:
    """Whether `folder` is an output of this run."""
    try:
        return run is not None and run == str(json.loads((folder / MARK).read_text("utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
