"""What a job has of the hub, and the folders and files whose names are near: what a person may have meant."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from planner.errors import Exit, UserError
from planner.hub import NOT_REACHED, Kind, is_downloaded
from planner.job.local_data import KINDS, is_local
from planner.job.schema import Job

_DEEPEST = 3  # folders below that of the job file
_MOST = 5000  # names that are looked at
_SHOWN = 3


def of_hub(job: Job) -> tuple[tuple[str, str, Kind], ...]:
    """Key, name and kind of what a job has of the hub."""
    named: list[tuple[str, str, Kind]] = [("model", job.model, "model"), ("tokenizer", job.tokenizer, "model")]
    for key, entries in (("dataset", job.data), ("eval_dataset", job.eval_data)):
        named += [(key, entry.path, "dataset") for entry in entries]
    told = {(name, kind): (key, name, kind) for key, name, kind in reversed(named) if not is_local(name)}
    return tuple(reversed(told.values()))


def taken_from_hub(job: Job) -> tuple[str, ...]:
    """What to say of a job's model and datasets that are not there, and that this machine has no download of: each may
    be a path with a mistake in it."""
    return tuple(
        f"{key}: there is no {'folder' if kind == 'model' else 'file or folder'} {name} beside the job file, and no"
        " download of it; it is taken as a name on the Hugging Face hub"
        for key, name, kind in of_hub(job)
        if not is_downloaded(name, kind)
    )


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
