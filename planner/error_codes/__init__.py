"""Explains each error code: its cause and its cure, in the Markdown of the documentation."""

from __future__ import annotations

from planner.error_codes import daemon, data, job_files, models, python, runs

THEMES: dict[str, dict[str, tuple[str, str]]] = {
    **job_files.THEMES,
    **models.THEMES,
    **data.THEMES,
    **runs.THEMES,
    **daemon.THEMES,
    **python.THEMES,
}
"""Theme -> code -> (cause, cure)."""
