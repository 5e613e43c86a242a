"""What `make test` runs: the list, how it is chosen, and the promises that it keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.cover import choose
from tests.support.selection import COLLECTED, Selection, owners, promises

pytest_plugins = ["pytester"]


@pytest.fixture
def there(pytestconfig: pytest.Config) -> frozenset[str]:
    """Every test there is."""
    found = pytestconfig.stash[COLLECTED]
    if len({name.partition("::")[0] for name in found}) < 100:
        pytest.skip("a part of the tests was asked for, and the lists are of all")
    return found


def test_each_promise_says_one_sentence_and_has_owners() -> None:
    for promise in promises():
        assert promise["says"].endswith("."), promise
        assert (ROOT / promise["where"]).exists() or promise["where"] == "DESIGN", promise
        assert 1 <= len(promise["owners"]) <= 4, promise
    said = [promise["says"] for promise in promises()]
    assert len(said) == len(set(said)) >= 70


def test_owners_of_promises_are_there_and_run_in_make_test(there: frozenset[str]) -> None:
    later = Selection.read().later
    functions = {name.partition("[")[0] for name in there}
    for owner in owners():
        assert owner in there or owner in functions, f"no such test: {owner}"
        names = {owner.partition("[")[0], owner}
        if owner not in there:  # all instances own it
            names |= {name for name in there if name.startswith(f"{owner}[")}
        assert names.isdisjoint(later), f"it owns a promise, and is later: {owner}"


def test_the_list_names_tests_that_are_there(there: frozenset[str]) -> None:
    found, known = Selection.read(), {name.partition("[")[0] for name in there} | there
    assert known >= found.later, f"not there any more: {sorted(found.later - known)[:5]}"
    assert {name.partition("::")[0] for name in there} >= set(found.first)


SECONDS = {"a::one": 1.0, "a::two[x]": 2.0, "a::two[y]": 0.5, "b::three": 9.0, "b::four": 1.0}
LINES = {"start": 0b1, "a::one": 0b0111, "a::two[x]": 0b1110, "a::two[y]": 0b0110, "b::three": 0b110000, "b::four": 0b1}


def test_those_are_taken_that_run_new_lines_in_least_time() -> None:
    assert choose(LINES, SECONDS, set(), 100) == set(SECONDS)
    assert choose(LINES, SECONDS, set(), 3.0) == {"a::two[y]", "a::two[x]"}
    assert choose(LINES, SECONDS, set(), 2.4) == {"a::two[y]", "a::one"}, "the cheapest fill what is left"
    assert choose(LINES, SECONDS, {"b::three"}, 3.0) == {"b::three"}, "what owns a promise is taken whatever it costs"


def test_a_list_says_in_few_words_what_is_later(tmp_path: Path) -> None:
    found = Selection.of({**SECONDS, "c::five[z]": 30.0}, {"a::one", "a::two[x]", "b::three"})
    assert found.later == {"a::two[y]", "b::four", "c::five"} and found.first == ("c",)
    assert Selection.of(SECONDS, {"a::one", "b::four"}).later == {"a::two", "b::three"}
    found.write(path := tmp_path / "list.toml")
    assert Selection.read(path) == found


def test_what_is_later_is_marked_and_files_of_most_seconds_begin(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_a="import pytest\n@pytest.mark.parametrize('x', [1, 2])\ndef test_it(x): pass\ndef test_other(): pass",
        test_b="def test_first(): pass",
    )
    pytester.makeconftest(
        "from tests.support.selection import Selection\n"
        "def pytest_configure(config): config.addinivalue_line('markers', 'later')\n"
        "def pytest_collection_modifyitems(items):\n"
        "    Selection(('test_b.py',), frozenset({'test_a.py::test_it[2]', 'test_a.py::test_other'})).mark(items)"
    )
    words = "--collect-only", "-q", "-p", "no:cacheprovider"
    now = pytester.runpytest_inprocess(*words, "-m", "not later").outlines
    assert now[:2] == ["test_b.py::test_first", "test_a.py::test_it[1]"]
    left = pytester.runpytest_inprocess(*words, "-m", "later").outlines
    assert left[:2] == ["test_a.py::test_it[2]", "test_a.py::test_other"]


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
SWEEPING = """
    from tests.conftest import pytest_addoption
    from tests.support.selection import leave_out

    def pytest_configure(config):
        config.addinivalue_line("markers", "sweep(n)")

    def pytest_collection_modifyitems(config, items):
        leave_out(config, items)
"""


def test_of_a_sweep_a_part_is_left_with_each_value_of_several_parameters(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(SWEEPING)
    pytester.makepyfile(SWEEPS)
    said = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-v").outlines
    chosen = {
        name: [re.findall("[0-9]", found[1]) for line in said if (found := re.search(rf"::{name}\[(.*?)\]", line))]
        for name in ("test_two", "test_pairs", "test_no_sweep")
    }
    assert [len(found) for found in chosen.values()] == [5, 3, 4]
    assert [{*places} for places in zip(*chosen["test_two"], strict=True)] == [{*"01234"}, {*"012"}]


def test_all_instances_run_where_that_is_said_and_those_that_are_named(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(SWEEPING)
    (file,) = pytester.makepyfile(SWEEPS).parent.glob("test_*.py")
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "--all-instances").assert_outcomes(passed=15 + 9 + 4)
    names = [f"{file.name}::test_pairs[{n}-{n}]" for n in range(9)]
    pytester.runpytest_inprocess("-p", "no:cacheprovider", *names).assert_outcomes(passed=9)
