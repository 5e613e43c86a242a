"""What `make test` leaves of sweeps: a part, and of several parameters each value."""

from __future__ import annotations

import re

import pytest

pytest_plugins = ["pytester"]

SWEEPS = """
    import pytest

    @pytest.mark.sweep(4)
    @pytest.mark.parametrize("a", range(3))
    @pytest.mark.parametrize("b", range(5))
    def test_two(a, b):
        pass

    @pytest.mark.sweep(4)
    @pytest.mark.parametrize(("a", "b"), [(n, n) for n in range(9)])
    def test_pairs(a, b):
        pass

    @pytest.mark.parametrize("a", range(4))
    def test_no_sweep(a):
        pass
"""
CONFTEST = """
    from tests.support import selection

    def pytest_configure(config):
        for mark in ("slow", "long", "sweep(n)"):
            config.addinivalue_line("markers", mark)

    def pytest_collection_modifyitems(items):
        selection.mark(items)
"""


def test_of_a_sweep_a_part_is_left_with_each_value_of_several_parameters(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SWEEPS)
    said = pytester.runpytest_inprocess("-m", "not long", "-p", "no:cacheprovider", "-v").outlines
    chosen = {
        name: [re.findall("[0-9]", found[1]) for line in said if (found := re.search(rf"::{name}\[(.*?)\]", line))]
        for name in ("test_two", "test_pairs", "test_no_sweep")
    }
    assert [len(found) for found in chosen.values()] == [5, 3, 4]
    assert [{*places} for places in zip(*chosen["test_two"], strict=True)] == [{*"01234"}, {*"012"}]
