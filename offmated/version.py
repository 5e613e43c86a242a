"""By what commands and daemon know that they are of one version."""

from __future__ import annotations

API = 15
"""The form of requests and answers: one more whenever they have another field, or one with another meaning."""


def release() -> str:
    """The version of the package."""
    from importlib.metadata import version  # slow to import, and only wanted where something is wrong

    return version("offmate")
