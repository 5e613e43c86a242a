"""The base of the classes that define a job's keys, one class for each theme.

The string below a field is the text of that key in `offmate keys` and in the reference, and a class's docstring is the
introduction of its section. `planner/job/described.py` reads both from the source.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Keys(BaseModel):
    """Some keys of a job file; a base class of `planner.job.schema.Job`."""

    # Job alone reads files, so only its validator is built at import.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)
