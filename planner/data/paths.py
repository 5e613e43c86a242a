"""Says whether a text in a job names something on this machine or on the Hugging Face hub, and makes paths absolute."""

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
"""Names that the hub accepts; all else is a path."""


NOTHING = "none"
"""Stands for the tokenizer and the data of a job that is only planned."""


def resolve(text: object, folder: Path | None) -> str:
    """`text` as an absolute path, `~` expanded."""
    if not isinstance(text, str):
        raise TypeError(f"it is {shown(text)}; it must be a path")
    if folder is None:
        return text
    try:
        return os.path.normpath(folder / Path(text).expanduser())
    except RuntimeError as error:
        raise FileNotFoundError(f"there is no home folder {text.split('/')[0]}") from error


def looks_local(text: str, folder: Path | None) -> bool:
    """True for a path, False for a Hugging Face id: "name" or "owner/name" where `folder` has nothing of that name."""
    if folder is None:
        return text.startswith("/")
    if text.startswith(("/", ".", "~")) or text.endswith("/") or not _HUB_ID.fullmatch(text):
        return True
    if text.lower().endswith((*KINDS, ".jinja")) or (folder / text).exists():
        return True
    return "/" in text and (folder / text.split("/")[0]).is_dir()


def path_or_id(text: object, folder: Path | None, what: str, kind: Kind = "model") -> Path | str:
    """The absolute path of something that exists, or a hub id. `what`: what the path should be, for the error; `kind`:
    the kind of names to suggest."""
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
    """A function that makes a dataset's path absolute, and raises where there is nothing to read."""

    def find(text: object) -> str:
        path = path_or_id(text, folder, "dataset", "dataset")
        if isinstance(path, Path):
            local_data(path)
        return str(path)

    return find
