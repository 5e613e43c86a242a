from __future__ import annotations

import pytest

from tests.support import engines
from tests.support.cuda.session import (
    pytest_collection_modifyitems,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    the_device,
)

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_setup", "pytest_runtest_teardown"]


@pytest.fixture
def make():
    """`engines.build`, whose engines are closed at the end."""
    made = []

    def build(*args, **kwargs):
        pair = engines.build(*args, **kwargs)
        made.append(pair[0])
        return pair

    yield build
    for engine in made:
        engine.close()
    assert engines.own_threads() == []


@pytest.fixture
def device():
    """The emulated CUDA device (tests/support/cuda), for tests marked `emulated`."""
    return the_device()
