"""Pins what a job takes from the Hugging Face hub to commits: a later upload changes no job that was submitted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from planner.data.entry import DataEntry
from planner.data.local_data import is_local
from planner.hub import ANSWER_S, Kind, unreachable
from planner.job.schema import Job

_COMMIT = re.compile("[0-9a-f]{40}")


def revision_of(job: Job) -> str:
    """The branch, tag or commit of the model's repository on the hub that the job uses."""
    return job.model_revision or "main"


def tokenizer_revision(job: Job) -> str:
    """The branch, tag or commit of the tokenizer's repository on the hub that the job uses. It is the model's revision
    where both have one repository and the job names no `tokenizer_revision`."""
    return job.tokenizer_revision or (revision_of(job) if job.tokenizer == job.model else "main")


class Run(Protocol):
    """The part of a run folder (`planner.run.folder.RunFolder`) that pinning uses."""

    @property
    def resolved(self) -> Path:
        """The path of `resolved.yaml`."""

    def write_resolved(self, text: str) -> None:
        """Replace the content of `resolved.yaml`."""

    def last_checkpoint_step(self) -> int | None:
        """The step of the last checkpoint; None where there is none."""

    def say(self, text: str) -> None:
        """Add a line to the job's log."""


def pin(run: Run) -> Job:
    """The job of a run folder, rewritten with the commits of what it takes from the hub. A job with a checkpoint is not
    changed: the checkpoint belongs to the job as it is."""
    job = Job.from_resolved(run.resolved)
    if run.last_checkpoint_step() is not None or (pinned_job := pinned(job)) == job:
        return job
    run.write_resolved(pinned_job.resolved_yaml())
    for line in told(job, pinned_job):
        run.say(line)
    return pinned_job


def pinned(job: Job) -> Job:
    """The job with a commit in place of a branch, a tag or nothing, for its model, for its tokenizer where that has
    another repository or revision, and for its datasets on the hub. The commit is the hub's answer, or the last
    download's where the hub does not answer; where neither has one, the revision stays as it is. Each revision of a
    repository is asked for once."""
    hub = _Hub()
    revisions = {"model_revision": job.model_revision, "tokenizer_revision": job.tokenizer_revision}
    if not is_local(job.model):
        revisions["model_revision"] = hub.commit(job.model, "model", job.model_revision)
    if not is_local(job.tokenizer) and (job.tokenizer != job.model or job.tokenizer_revision):
        revisions["tokenizer_revision"] = hub.commit(job.tokenizer, "model", job.tokenizer_revision)
    entries = tuple(_pinned(entry, hub) for entry in job.dataset)
    held_out = None if job.eval_dataset is None else tuple(_pinned(entry, hub) for entry in job.eval_dataset)
    return job.model_copy(update={**revisions, "dataset": entries, "eval_dataset": held_out})


def told(before: Job, after: Job) -> Iterator[str]:
    """What `pinned` has changed in a job, a line for each repository."""
    if before.model_revision != after.model_revision:
        yield f"the model {before.model}, {before.model_revision or 'main'}, is commit {after.model_revision}"
    if before.tokenizer_revision != after.tokenizer_revision:
        revision = before.tokenizer_revision or "main"
        yield f"the tokenizer {before.tokenizer}, {revision}, is commit {after.tokenizer_revision}"
    pairs = zip((*before.data, *before.eval_data), (*after.data, *after.eval_data), strict=True)
    changed = [(one, other) for one, other in pairs if one != other]
    yield from dict.fromkeys(
        f"the dataset {one.path}, {one.revision or 'main'}, is commit {other.revision}" for one, other in changed
    )


def _pinned(entry: str | DataEntry, hub: _Hub) -> str | DataEntry:
    path, revision = (entry, None) if isinstance(entry, str) else (entry.path, entry.revision)
    if is_local(path) or (commit := hub.commit(path, "dataset", revision)) == revision:
        return entry
    whole = DataEntry(path=entry) if isinstance(entry, str) else entry
    return whole.model_copy(update={"revision": commit})


class _Hub:
    """The hub's answers, asked for once. Where the hub cannot be reached it is not asked again: each attempt takes
    `ANSWER_S`."""

    def __init__(self) -> None:
        from huggingface_hub import constants

        self._known: dict[tuple[str, Kind, str | None], str | None] = {}
        self._silent = constants.HF_HUB_OFFLINE

    def commit(self, name: str, kind: Kind, revision: str | None) -> str | None:
        """The commit of a repository's revision; `revision` itself where it is a commit, or where no commit can be
        found."""
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        request = (name, kind, revision)
        if request not in self._known:
            self._known[request] = self._answer(*request) or _of_last_download(*request) or revision
        return self._known[request]

    def _answer(self, name: str, kind: Kind, revision: str | None) -> str | None:
        from huggingface_hub import HfApi

        if self._silent:
            return None
        try:
            return HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=ANSWER_S).sha
        except Exception as error:  # any error of the HTTP client: loading meets it again and reports it
            self._silent = unreachable(error)
            return None


def _of_last_download(name: str, kind: Kind, revision: str | None) -> str | None:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    try:
        ref = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind), "refs", revision or "main")
        commit = ref.read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None
