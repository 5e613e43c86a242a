"""Folders and files whose names are near one that is not there: what a person may have meant by a name of the hub."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from planner.errors import Exit, UserError
from planner.hub import NOT_REACHED, Kind
from planner.job.local_data import KINDS

_DEEPEST = 3  # folders below that of the job file
_MOST = 5000  # names that are looked at
_SHOWN = 3


def near(name: str, kind: Kind, folder: Path) -> tuple[str, ...]:
    """What lies below `folder` and is called nearly as `name`, as paths from there ("./models/tiny"), the nearest
    first: folders with a config.json for a model, data files and folders for a dataset. None of it is opened."""
    places = {f"./{path}": path for path in _places(folder, kind)}
    paths = difflib.get_close_matches(name, list(places.values()), n=_SHOWN)
    last = {place: Path(path).stem for place, path in places.items()}
    names = difflib.get_close_matches(Path(name).stem, list(dict.fromkeys(last.values())), n=_SHOWN, cutoff=0.7)
    found = [f"./{path}" for path in paths] + [place for one in names for place in last if last[place] == one]
    return tuple(dict.fromkeys(found))[:_SHOWN]


def _places(folder: Path, kind: Kind) -> Iterator[str]:
    left = _MOST
    for path, folders, files in os.walk(folder):
        here = Path(path).relative_to(folder)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if len(here.parts) < _DEEPEST else []
        left -= len(folders) + len(files)
        if left < 0:
            return
        if here.parts and (kind == "dataset" or "config.json" in files):
            yield here.as_posix()
        if kind == "dataset":
            yield from ((here / name).as_posix() for name in files if Path(name).suffix.lower() in KINDS)


def no_such_name(key: str, name: str, kind: Kind, folder: Path | None, why: UserError) -> UserError:
    """The error of a name that is no path and no download, while the hub does not answer (`why`). Near names are looked
    for below `folder`, that of the job file."""
    found = () if folder is None else near(name, kind, folder)
    meant = f"did you mean {' or '.join(found)}? Else " if found else ""
    what = "folder" if kind == "model" else "file or folder"
    return UserError(
        f"{key}: there is no {what} {name}, and the Hugging Face hub cannot be asked for it.", code=NOT_REACHED,
        exit_code=Exit.USAGE, numbers=why.numbers,
        hint=f"{meant}give the path of a {what} ({key}: ./…), or submit again with a network",
    )  # fmt: skip
