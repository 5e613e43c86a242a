"""Decides whether a text in a job file names something on this machine or on the Hugging Face hub, and makes paths
absolute."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from planner.data.local_data import KINDS, local_data
from planner.data.near import near_path
from planner.hub import Kind
from planner.keys.source import shown

_HUB_NAME = r"[A-Za-z0-9_]([\w.-]{0,94}\w)?"


_HUB_ID = re.compile(rf"(?!.*(--|\.\.|\.git$))({_HUB_NAME}/)?{_HUB_NAME}")
"""Names that the hub accepts. Anything else is a path."""


NOTHING = "none"
"""The value of `tokenizer` and `dataset` in a job that is only planned and needs neither."""


def resolve(text: object, folder: Path | None) -> str:
    """Return the path `text` as an absolute one, with `~` expanded. `folder`: where relative paths start; None: `text`
    is absolute already. Raises TypeError for a value that is not text, FileNotFoundError for an unknown user's home."""
    if not isinstance(text, str):
        raise TypeError(f"it is {shown(text)}; it must be a path")
    if folder is None:
        return text
    try:
        return os.path.normpath(folder / Path(text).expanduser())
    except RuntimeError as error:
        raise FileNotFoundError(f"there is no home folder {text.split('/')[0]}") from error


def looks_local(text: str, folder: Path | None) -> bool:
    """Return True for a path and False for a Hugging Face id: "name" or "owner/name" where `folder` has no file or
    folder of that name. `folder` None: only absolute paths are paths."""
    if folder is None:
        return Path(text).is_absolute()
    if text.startswith(("/", ".", "~")) or text.endswith("/") or not _HUB_ID.fullmatch(text):
        return True
    if text.lower().endswith((*KINDS, ".jinja")) or (folder / text).exists():
        return True
    return "/" in text and (folder / text.split("/")[0]).is_dir()


def path_or_id(text: object, folder: Path | None, what: str, kind: Kind = "model") -> Path | str:
    """Return the absolute path of something that exists, or the text itself where it is a Hugging Face id. `what`: what
    the path should be, for the error; `kind`: whether to suggest models or datasets with a similar name. Raises
    TypeError for a value that is not text, FileNotFoundError for a path that does not exist."""
    if not isinstance(text, str) or not text:
        raise TypeError(f"it is {shown(text)}; it must be a path or a Hugging Face id")
    if not looks_local(text, folder):
        return text
    path = Path(resolve(text, folder))
    if not path.exists():
        similar = near_path(path, kind, folder) if folder is not None else ()
        meant = f"; did you mean {' or '.join(similar)}?" if similar else ""
        raise FileNotFoundError(f"there is no {what} at {path}{meant}")
    return path


def data_finder(folder: Path | None) -> Callable[[object], str]:
    """Return a function that makes a dataset's path absolute and returns a hub id unchanged. It raises what
    `path_or_id` and `local_data` raise, where there is nothing to read. `folder`: where relative paths start."""

    def find(text: object) -> str:
        path = path_or_id(text, folder, "dataset", "dataset")
        if isinstance(path, Path):
            local_data(path)
        return str(path)

    return find
