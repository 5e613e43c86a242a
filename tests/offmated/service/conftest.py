"""Daemons for the tests of the service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemons import House, house


@pytest.fixture(scope="module")
def shared() -> Iterator[House]:
    """One daemon for the tests that leave it as it was."""
    with house() as built:
        yield built


@pytest.fixture
def own() -> Iterator[House]:
    """A daemon for tests that end or hurt it."""
    with house() as built:
        yield built
