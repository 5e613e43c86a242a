"""Finds what a question needs to know of its model, without torch: the text of its config, and a title for pictures."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from planner.job.schema import Job


def config_file(model: str, revision: str | None = None) -> Path | None:
    """The file with a model's config if it is on this machine (the file itself, in a folder, or of a downloaded model,
    at its `revision`); otherwise None."""
    path = Path(model)
    if path.is_file() or path.is_dir():
        file = path if path.is_file() else path / "config.json"
        return file if file.is_file() else None
    try:
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:  # not an id: reading the model reports that
        return None
    return Path(cached) if isinstance(cached, str) else None


def config_text(model: str) -> str | None:
    """The text of a model's config if it is on this machine; otherwise None."""
    file = config_file(model)
    return None if file is None else file.read_text("utf-8", errors="replace")


def title_of(job: Job) -> str:
    """The title for a picture of the job's plan: the run's name, or the model's."""
    return job.run_name or Path(job.model).name.removesuffix(".json")
