"""Notes at submission what a job's local data, the adapter that it continues and the installed packages are, and finds
later changes.

A job whose data or adapter have changed is refused. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from planner.data.local_data import is_local, local_data
from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.keys.adapter import CONFIG, WEIGHTS
from planner.keys.trackers import SETTINGS

_SHOWN = 5
Frozen = Mapping[str, Mapping[str, Any]]
"""What is noted of local files: path of a file -> its size in `bytes` and the `hash` of its content. Modification times
are not noted, because copying a file may keep them."""


PACKAGES = ("offmate", "torch", "transformers", "tokenizers", "datasets", "trl", "peft", "bitsandbytes", "numpy")
"""The packages whose versions may change what a job learns; some of them are used by some jobs only."""
_NOT_LEARNED = {"run_name", "report_to", "output_dir", "schedule"}.union(*SETTINGS.values())


def fingerprint(job: Job, frozen: Frozen, checkpoint: Path | None = None) -> str:
    """Return a hash that is equal for jobs that do the same training on the same local data. `frozen`: what is noted of
    these data; `checkpoint`: the checkpoint of a shorter run from which the job starts, None for the beginning. Run
    name, trackers, output folder and schedule do not change the hash."""
    work = job.model_dump(mode="json", exclude=_NOT_LEARNED)
    parts = [work, frozen] if checkpoint is None else [work, frozen, str(checkpoint)]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def package_versions() -> dict[str, str]:
    """Return the installed versions of `PACKAGES`: name -> version."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def changed_packages(before: Mapping[str, str] | None) -> tuple[str, ...]:
    """Return a line for each package whose version differs from `before` (name -> version); none where `before` is
    None, as the old versions are not known."""
    if before is None:
        return ()
    now = package_versions()
    names = (name for name in PACKAGES if now.get(name) != before.get(name))
    return tuple(f"{name} {now.get(name, 'is gone')}, at its submission {before.get(name, 'none')}" for name in names)


def freeze(job: Job) -> dict[str, dict[str, Any]]:
    """Return what identifies the job's local data and adapter files (see `Frozen`), after reading all of them. Raises
    OSError."""
    return {str(file): _told(file) for file in _files(job)}


def check_frozen(
    job: Job,
    frozen: Frozen | None,
    *,
    hint: str = "train on what is there now: offmate retry ID --allow-changed-data",
) -> None:
    """Raise UserError `data-changed` if the job's local data, or the adapter that it continues, have changed since it
    was submitted. `frozen`: what was noted then; None: nothing was, and nothing is checked. `hint`: what the user can
    do besides restoring the files. Raises OSError."""
    if frozen is None:
        return
    now = set(map(str, _files(job)))
    changes = [f"{path}: there was no such file" for path in sorted(now - frozen.keys())]
    places = [entry.path for entry in (*job.data, *job.eval_data)]
    if job.adapter_name_or_path is not None:
        places.append(job.adapter_name_or_path)
    gone = (path for path in frozen.keys() - now if any(Path(path).is_relative_to(place) for place in places))
    changes += [f"{path}: it is gone" for path in sorted(gone) if not Path(path).exists()]
    for path in sorted(now & frozen.keys()):
        current = _told(Path(path))
        if current != frozen[path] and not _is_as_before(Path(path), frozen[path]):
            before, after = frozen[path]["bytes"], current["bytes"]
            changes.append(f"{path}: " + (f"{before} bytes, now {after}" if before != after else "other content"))
    if changes:
        more = [f"and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
        raise UserError(
            "The files are not those that the job was submitted with.",
            code="data-changed",
            exit_code=Exit.USAGE,
            numbers=(*changes[:_SHOWN], *more),
            hint=f"put them back, or {hint}",
        )


def other_content(before: Mapping[str, Mapping[str, Any]] | None, now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each file whose content differs between two notes on data or on a base model, `before` and
    `now`, or may differ because it was not read in full. `before` None: the old content is not known, which one line
    says."""
    if before is None:
        return ["it is not known what they were when the job was submitted"]
    lines = [f"{path}, which is gone" for path in sorted(before.keys() - now.keys())]
    lines += [f"{path}, which is new" for path in sorted(now.keys() - before.keys())]
    for path in sorted(before.keys() & now.keys()):
        one, other = before[path], now[path]
        if one["bytes"] != other["bytes"]:
            lines.append(f"{path}: {one['bytes']} bytes, now {other['bytes']}")
        elif None in (one["hash"], other["hash"]):
            if one.get("status") != other.get("status"):
                lines.append(f"{path}, which was written to or moved; its content was not read in full")
        elif one["hash"] != other["hash"]:
            lines.append(f"{path}: other content")
    return lines


def _is_as_before(path: Path, before: Mapping[str, Any]) -> bool:
    """Return whether a file larger than 1 GiB is as an earlier version of offmate noted it: that version hashed only
    the first GiB, and noted the modification time."""
    status = path.stat()
    return (status.st_size, status.st_mtime_ns) == (before["bytes"], before.get("changed_ns"))


def _files(job: Job) -> list[Path]:
    """Return the existing local files of all datasets, and of the adapter that the job continues."""
    files: dict[Path, None] = {}
    for entry in (*job.data, *job.eval_data):
        path = Path(entry.path)
        if is_local(entry.path) and path.exists():
            try:
                data = local_data(path)
            except (OSError, ValueError):  # the data are no longer readable
                continue
            files |= dict.fromkeys(data.files)
    if job.adapter_name_or_path is not None:
        parts = (Path(job.adapter_name_or_path) / name for name in (CONFIG, WEIGHTS))
        files |= dict.fromkeys(part for part in parts if part.is_file())
    return list(files)


def _told(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16))
        return {"bytes": content.tell(), "hash": digest.hexdigest()}
