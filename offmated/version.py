"""Gives the version of offmate, by which commands and daemon see whether they are of the same one."""

from __future__ import annotations

API = 16
"""The version of requests and answers: raised by one whenever a field is added, removed or changes its meaning."""


def release() -> str:
    """The version of the installed package `offmate`, as text."""
    from importlib.metadata import version  # late: slow to import, and seldom needed

    return version("offmate")
