"""A daemon that comes to the state folder of an earlier version, killed in the midst of it. Some tests take seconds:
they start a daemon, its broker and its workers."""

from __future__ import annotations

import pytest

from tests.support.accidents import upgrade


@pytest.mark.parametrize("version", ["0001-last", "0003-last"])
def test_the_queue_of_an_earlier_version_goes_on(version: str) -> None:
    upgrade(version)
