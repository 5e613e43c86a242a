"""The names in a job that stand for something on the Hugging Face hub. Each may be a local path with a typing
mistake."""

from __future__ import annotations

from pathlib import Path

from planner.data.local_data import is_local
from planner.data.near import near
from planner.errors import Exit, UserError
from planner.hub import NOT_REACHED, Kind, is_downloaded
from planner.job.schema import Job


def of_hub(job: Job) -> tuple[tuple[str, str, Kind], ...]:
    """Return the job's key, the name and the kind ("model" or "dataset") of each model, tokenizer and dataset that the
    job takes from the hub."""
    named: list[tuple[str, str, Kind]] = [("model", job.model, "model"), ("tokenizer", job.tokenizer, "model")]
    for key, entries in (("dataset", job.data), ("eval_dataset", job.eval_data)):
        named += [(key, entry.path, "dataset") for entry in entries]
    unique = {(name, kind): (key, name, kind) for key, name, kind in reversed(named) if not is_local(name)}
    return tuple(reversed(unique.values()))


def taken_from_hub(job: Job) -> tuple[str, ...]:
    """Return notes on those models and datasets on the hub that this machine has not downloaded: each name may be a
    path with a typing mistake."""
    return tuple(
        f"{key}: there is no {'folder' if kind == 'model' else 'file or folder'} {name} beside the job file, and no"
        " download of it; it is taken as a name on the Hugging Face hub"
        for key, name, kind in of_hub(job)
        if not is_downloaded(name, kind)
    )


def no_such_name(key: str, name: str, kind: Kind, folder: Path | None, why: UserError) -> UserError:
    """Return the error for a name that is no local path and was not downloaded, while the hub does not answer (`why`).
    `key`: the job's key with the name. `folder`: the job file's folder, below which similar names are looked for; None:
    nowhere."""
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
