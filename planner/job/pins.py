"""Commits of what a job has of the Hugging Face hub: what is uploaded later changes no job that was handed in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from planner.job.data_entry import DataEntry
from planner.job.local_data import is_local
from planner.job.schema import Job

ANSWER_S = 10.0
"""For the hub to say which commit a branch is; else what was downloaded last counts."""
_COMMIT = re.compile("[0-9a-f]{40}")
Kind = Literal["model", "dataset"]


def pinned(job: Job) -> Job:
    """The job with a commit where it has a branch, a tag or nothing, of its model and its datasets on the hub: as the
    hub says, or where that does not answer, the last download's. What neither knows stays as it is."""
    revision = job.model_revision
    if not is_local(job.model):
        revision = _commit(job.model, "model", revision)
    entries = tuple(map(_pinned, job.dataset))
    held_out = None if job.eval_dataset is None else tuple(map(_pinned, job.eval_dataset))
    return job.model_copy(update={"model_revision": revision, "dataset": entries, "eval_dataset": held_out})


def told(before: Job, after: Job) -> Iterator[str]:
    """What `pinned` has made of a job, a line for each repository."""
    if before.model_revision != after.model_revision:
        yield f"the model {before.model}, {before.model_revision or 'main'}, is commit {after.model_revision}"
    for one, other in zip((*before.data, *before.eval_data), (*after.data, *after.eval_data), strict=True):
        if one != other:
            yield f"the dataset {one.path}, {one.revision or 'main'}, is commit {other.revision}"


def _pinned(entry: str | DataEntry) -> str | DataEntry:
    path, revision = (entry, None) if isinstance(entry, str) else (entry.path, entry.revision)
    if is_local(path) or (commit := _commit(path, "dataset", revision)) == revision:
        return entry
    whole = DataEntry(path=entry) if isinstance(entry, str) else entry
    return whole.model_copy(update={"revision": commit})


def _commit(name: str, kind: Kind, revision: str | None) -> str | None:
    """The commit of a revision of a repository; `revision` itself where it is one, or none can be told."""
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    return _of_hub(name, kind, revision) or _of_last_download(name, kind, revision) or revision


def _of_hub(name: str, kind: Kind, revision: str | None) -> str | None:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=ANSWER_S).sha
    except Exception:  # whatever it is, loading meets it again, has patience with it and says it
        return None


def _of_last_download(name: str, kind: Kind, revision: str | None) -> str | None:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    ref = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind), "refs", revision or "main")
    try:
        commit = ref.read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None
