"""A job's data as they were when it was handed in: what is trained on is that, or the job is refused. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import Exit, UserError
from planner.job.local_data import is_local, local_data
from planner.job.schema import Job

HASHED_BYTES = 2**30
"""Of a file, which a second is enough for. What comes behind is told by the file's size and time of change."""
_SHOWN = 5
Frozen = Mapping[str, Mapping[str, Any]]
"""Path of a file -> its size in bytes, the hash of its beginning, and when it is longer the time of its last change."""


def freeze(job: Job) -> dict[str, dict[str, Any]]:
    """What tells the job's local files from others. Raises OSError."""
    return {str(file): _told(file) for file in _files(job)}


def check_frozen(job: Job, frozen: Frozen | None) -> None:
    """Raise UserError `data-changed` where the local data are not those that were handed in; `frozen` None: nobody
    knows what these were."""
    if frozen is None:
        return
    now = set(map(str, _files(job)))
    changes = [f"{path}: there was no such file" for path in sorted(now - frozen.keys())]
    places = [entry.path for entry in (*job.data, *job.eval_data)]
    gone = (path for path in frozen.keys() - now if any(Path(path).is_relative_to(place) for place in places))
    changes += [f"{path}: it is gone" for path in sorted(gone)]
    for path in sorted(now & frozen.keys()):
        told = _told(Path(path))
        if told != frozen[path]:
            before, after = frozen[path]["bytes"], told["bytes"]
            changes.append(f"{path}: " + (f"{before} bytes, now {after}" if before != after else "other content"))
    if changes:
        more = [f"and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
        raise UserError(
            "The data are not those that the job was submitted with.", code="data-changed", exit_code=Exit.USAGE,
            numbers=(*changes[:_SHOWN], *more),
            hint="put them back, or train on what is there now: offmate retry ID --allow-changed-data",
        )  # fmt: skip


def _files(job: Job) -> list[Path]:
    """The local files of all entries, those of a saved dataset's folder among them; what is gone is left out."""
    found: dict[Path, None] = {}
    for entry in (*job.data, *job.eval_data):
        path = Path(entry.path)
        if is_local(entry.path) and path.exists():
            try:
                data = local_data(path)
            except (OSError, ValueError):  # nothing to read is there any more
                continue
            files = data.files or sorted(file for file in path.rglob("*") if file.is_file())
            found |= dict.fromkeys(files)
    return list(found)


def _told(file: Path) -> dict[str, Any]:
    digest, left = hashlib.blake2b(digest_size=16), HASHED_BYTES
    with file.open("rb") as content:
        while left and (piece := content.read(min(left, 2**20))):
            digest.update(piece)
            left -= len(piece)
    status = file.stat()
    told: dict[str, Any] = {"bytes": status.st_size, "hash": digest.hexdigest()}
    return told | {"changed_ns": status.st_mtime_ns} if status.st_size > HASHED_BYTES else told
