"""Reads a job's keys from its run folder, and tells which are not the defaults."""

from __future__ import annotations

from functools import cache
from typing import Any

from planner.job.schema import Job
from planner.keys.source import read_text, read_yaml
from planner.run.folder import RunFolder


def keys_of(run: RunFolder) -> tuple[dict[str, Any], list[str]]:
    """(key -> its value as offmate understands the job, with all defaults; the keys whose values are not the defaults).
    A tokenizer that is the model's own is a default. Raises UserError where `resolved.yaml` cannot be read."""
    keys = read_yaml(read_text(run.resolved, longest=None), run.resolved.name, longest=None).values
    usual = _defaults() | {"tokenizer": keys.get("model"), "tokenizer_revision": keys.get("model_revision")}
    return keys, [key for key, value in keys.items() if key not in usual or usual[key] != value]


@cache
def _defaults() -> dict[str, Any]:
    """Key -> its default, for the keys that have one, in the form in which `resolved.yaml` has them."""
    required = {key: () for key, field in Job.model_fields.items() if field.is_required()}
    values = Job.model_construct(None, **required).model_dump(mode="json", warnings=False)
    return {key: value for key, value in values.items() if key not in required}
