from __future__ import annotations

import pytest

from tests.support import engines


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
