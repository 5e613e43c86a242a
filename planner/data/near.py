"""Finds files and folders whose names are similar to a missing one, for suggestions such as "did you mean
./models/tiny?"."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from planner.data.local_data import KINDS
from planner.hub import Kind

_DEEPEST = 3  # folders below that of the job file
_MOST = 5000  # names that are looked at
_SHOWN = 3


def near(name: str, kind: Kind, folder: Path) -> tuple[str, ...]:
    """Return up to 3 paths below `folder` whose names are similar to `name`, the most similar first, relative to
    `folder` ("./models/tiny"). For `kind` "model" these are folders with a config.json, for "dataset" data files and
    folders. Opens no file."""
    places = {f"./{path}": path for path in _places(folder, kind)}
    paths = difflib.get_close_matches(name, list(places.values()), n=_SHOWN)
    last = {place: Path(path).stem for place, path in places.items()}
    names = difflib.get_close_matches(Path(name).stem, list(dict.fromkeys(last.values())), n=_SHOWN, cutoff=0.7)
    similar = [f"./{path}" for path in paths] + [place for stem in names for place in last if last[place] == stem]
    return tuple(dict.fromkeys(similar))[:_SHOWN]


def near_path(path: Path, kind: Kind, folder: Path) -> tuple[str, ...]:
    """Return up to 3 paths whose names are similar to the missing `path`: those in the same folder or, where there are
    none, those below `folder`, the job file's folder. Paths inside `folder` are relative to it ("./models/tiny"),
    others are absolute."""
    with suppress(OSError):
        beside = {place.name: place for place in islice(path.parent.iterdir(), _MOST) if _serves(place, kind)}
        if similar := difflib.get_close_matches(path.name, list(beside), n=_SHOWN):
            return tuple(_told(beside[name], folder) for name in similar)
    return near(_told(path, folder).removeprefix("./"), kind, folder)


def _told(path: Path, folder: Path) -> str:
    return f"./{path.relative_to(folder)}" if path.is_relative_to(folder) else str(path)


def _serves(path: Path, kind: Kind) -> bool:
    if path.is_dir():
        return kind == "dataset" or (path / "config.json").is_file()
    return kind == "dataset" and path.suffix.lower() in KINDS


def _places(folder: Path, kind: Kind) -> Iterator[str]:
    names_left = _MOST
    for path, folders, files in os.walk(folder):
        here = Path(path).relative_to(folder)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if len(here.parts) < _DEEPEST else []
        names_left -= len(folders) + len(files)
        if names_left < 0:
            return
        if here.parts and (kind == "dataset" or "config.json" in files):
            yield here.as_posix()
        if kind == "dataset":
            yield from ((here / name).as_posix() for name in files if Path(name).suffix.lower() in KINDS)
