"""Which test files take long, and are left out by `make test-fast`: those of `tests/slow.txt`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests import ROOT

LIST = ROOT / "tests" / "slow.txt"


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark the tests of the files in the list, and of the folders."""
    slow = {ROOT / "tests" / name for name in LIST.read_text().split()}
    assert all(path.exists() for path in slow), f"{LIST} names what is not there"
    for item in items:
        if not slow.isdisjoint((item.path, *item.path.parents)):
            item.add_marker(pytest.mark.slow)
