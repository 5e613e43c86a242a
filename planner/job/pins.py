"""Replaces the branches and tags of everything that a job takes from the Hugging Face hub by commits, so that a later
upload changes no job that was submitted."""

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
    """Return the branch, tag or commit at which the job uses the model's repository on the hub."""
    return job.model_revision or "main"


def tokenizer_revision(job: Job) -> str:
    """Return the branch, tag or commit at which the job uses the tokenizer's repository on the hub. Where the model and
    the tokenizer are in the same repository and the job has no `tokenizer_revision`, it is the model's revision."""
    return job.tokenizer_revision or (revision_of(job) if job.tokenizer == job.model else "main")


class Run(Protocol):
    """The methods of a run folder (`planner.run.folder.RunFolder`) that this module calls."""

    @property
    def resolved(self) -> Path:
        """The path of the run folder's `resolved.yaml`, which is the job with every default written out."""

    def write_resolved(self, text: str) -> None:
        """Replace the content of the run folder's `resolved.yaml`, which is the job with every default written out."""

    def last_checkpoint_step(self) -> int | None:
        """Return the step of the last checkpoint; None where there is none."""

    def say(self, text: str) -> None:
        """Add a line to the job's log."""


def pin(run: Run) -> Job:
    """Return the job of a run folder with its revisions on the Hugging Face hub (branches, tags) replaced by commits,
    and write it to `resolved.yaml`. A job that has a checkpoint is returned unchanged, because its checkpoint belongs
    to the job as it is."""
    job = Job.from_resolved(run.resolved)
    if run.last_checkpoint_step() is not None or (pinned_job := pinned(job)) == job:
        return job
    run.write_resolved(pinned_job.resolved_yaml())
    for line in told(job, pinned_job):
        run.say(line)
    return pinned_job


def pinned(job: Job) -> Job:
    """Return the job with a commit as the revision of its model, of its tokenizer where that has another repository or
    revision, and of its datasets on the hub.

    The hub says which commit a branch or tag is. Where it does not answer, the last download on this machine does;
    where there is none either, the revision stays as it is. Each revision of a repository is asked for once.
    """
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
    """Yield a line of text for each repository on the hub whose revision was replaced by a commit. `before`, `after`:
    the job before and after `pinned`."""
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
    """The hub's answers, each asked for once. After the hub could not be reached once, it is not asked again, because
    each attempt takes `ANSWER_S` seconds."""

    def __init__(self) -> None:
        from huggingface_hub import constants

        self._known: dict[tuple[str, Kind, str | None], str | None] = {}
        self._silent = constants.HF_HUB_OFFLINE

    def commit(self, name: str, kind: Kind, revision: str | None) -> str | None:
        """Return the commit of a repository's revision; `revision` itself where it is a commit already, or where no
        commit can be found."""
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
