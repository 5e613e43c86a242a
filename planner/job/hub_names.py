"""Names that a job takes from the hub. Each may be a path with a typing mistake."""

from __future__ import annotations

from pathlib import Path

from planner.data.local_data import is_local
from planner.data.near import near
from planner.errors import Exit, UserError
from planner.hub import NOT_REACHED, Kind, is_downloaded
from planner.job.schema import Job


def of_hub(job: Job) -> tuple[tuple[str, str, Kind], ...]:
    """Key, name and kind of all that a job takes from the hub."""
    named: list[tuple[str, str, Kind]] = [("model", job.model, "model"), ("tokenizer", job.tokenizer, "model")]
    for key, entries in (("dataset", job.data), ("eval_dataset", job.eval_data)):
        named += [(key, entry.path, "dataset") for entry in entries]
    unique = {(name, kind): (key, name, kind) for key, name, kind in reversed(named) if not is_local(name)}
    return tuple(reversed(unique.values()))


def taken_from_hub(job: Job) -> tuple[str, ...]:
    """Notes on a job's model and datasets that are no local paths and have no download on this machine: each may be a
    path with a typing mistake."""
    return tuple(
        f"{key}: there is no {'folder' if kind == 'model' else 'file or folder'} {name} beside the job file, and no"
        " download of it; it is taken as a name on the Hugging Face hub"
        for key, name, kind in of_hub(job)
        if not is_downloaded(name, kind)
    )


def no_such_name(key: str, name: str, kind: Kind, folder: Path | None, why: UserError) -> UserError:
    """The error of a name that is no path and has no download, while the hub does not answer (`why`). Similar names are
    searched for below `folder`, the job file's folder."""
    similar = () if folder is None else near(name, kind, folder)
    meant = f"did you mean {' or '.join(similar)}? Else " if similar else ""
    what = "folder" if kind == "model" else "file or folder"
    return UserError(
        f"{key}: there is no {what} {name}, and the Hugging Face hub cannot be asked for it.",
        code=NOT_REACHED,
        exit_code=Exit.USAGE,
        numbers=why.numbers,
        hint=f"{meant}give the path of a {what} ({key}: ./…), or submit again with a network",
    )
