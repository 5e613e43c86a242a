"""Which tests `make test` leaves to `make test-all`: those that tests/selection.toml lists, which are marked `later`.

The list is made by `python -m tests.support.cover`. It names functions and instances, so a new function runs in
`make test`. Promises (tests/promises.toml) are kept by tests that are not later.

Of the instances of a test with `sweep(n)` one in n runs, and more where else a value of one of several parameters would
be missing; with `--all-instances` all of them run. Sweeps are over seeds and crossed parameters; of instances that are
features of their own all run.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

LIST = ROOT / "tests" / "selection.toml"
PROMISES = ROOT / "tests" / "promises.toml"
COLLECTED = pytest.StashKey[frozenset[str]]()
"""The names of the tests of the files that were asked for, later ones, too."""
_HEAD = """\
# Made by `python -m tests.support.cover`, which takes hours; between its runs tests are moved by hand. A test that is
# not under `later` runs in `make test`.
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """`later`: functions (file::function) and instances (file::function[parameters]) that `make test` leaves out.
    `first`: files to begin with, those of most seconds, so that the last tests are short."""

    first: tuple[str, ...] = ()
    later: frozenset[str] = frozenset()

    @classmethod
    def read(cls, path: Path = LIST) -> Selection:
        """As it is written in `path`."""
        found = tomllib.loads(path.read_text("utf-8"))
        return cls(tuple(found["first"]), frozenset(found["later"]))

    @classmethod
    def of(cls, seconds: Mapping[str, float], taken: Iterable[str]) -> Selection:
        """All tests in `seconds` but those `taken` are later, in as few words as say it."""
        files, functions = defaultdict[str, float](float), defaultdict[str, set[str]](set)
        for name, its in seconds.items():
            function = name.partition("[")[0]
            files[name.partition("::")[0]] += its
            functions[function].add(name)
        left = seconds.keys() - set(taken)
        for function, names in functions.items():
            if names <= left and names != {function}:
                left = left - names | {function}
        first = sorted(files, key=lambda file: -files[file])
        return cls(tuple(file for file in first if files[file] > 20), frozenset(left))

    def write(self, path: Path = LIST) -> None:
        """To `path`, a line each."""

        def written(names: Iterable[str]) -> str:
            return "".join(f"    {json.dumps(name)},\n" for name in names)

        lists = f"first = [\n{written(self.first)}]\nlater = [\n{written(sorted(self.later))}]\n"
        path.write_text(_HEAD + lists, "utf-8")

    def mark(self, items: list[pytest.Item]) -> None:
        """Mark what is later, and bring the files to begin with to the front."""
        for item in items:
            file, _, rest = item.nodeid.partition("::")
            names = f"{file}::{rest.partition('[')[0]}", item.nodeid
            if not self.later.isdisjoint(names):
                item.add_marker(pytest.mark.later)
        places = {file: place for place, file in enumerate(self.first)}
        items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def leave_out(config: pytest.Config, items: list[pytest.Item], *, everything: bool = False) -> None:
    """Deselect the instances that sweeps leave out: none where `everything` is to run, as `--all-instances` says, or
    where instances are asked for by name or as those that failed before."""
    named = any("[" in word for word in config.args)
    if everything or named or any(config.getoption(name, False) for name in ("all_instances", "lf", "failedfirst")):
        return
    sweeps: dict[tuple[str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if (sweep := item.get_closest_marker("sweep")) is not None and isinstance(item, pytest.Function):
            sweeps[item.nodeid.partition("[")[0], *sweep.args].append(item)
    left = {item for (_, every), instances in sweeps.items() for item in repeats(instances, every)}
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


def promises(path: Path = PROMISES) -> list[dict[str, Any]]:
    """What users rely on: `says`, in a sentence; `where` in the documents; `owners`, the tests that would fail."""
    found: list[dict[str, Any]] = tomllib.loads(path.read_text("utf-8"))["promise"]
    return found


def owners() -> set[str]:
    """The tests that own a promise: functions, or instances of one."""
    return {owner for promise in promises() for owner in promise["owners"]}


def _places(values: list[object]) -> tuple[int, ...]:
    """For each value where it comes first: the same object is the same value."""
    first = {id(value): place for place, value in reversed([*enumerate(values)])}
    return tuple(first[id(value)] for value in values)


def repeats(instances: list[pytest.Function], every: int) -> list[pytest.Function]:
    """Those instances of a sweep beyond one in `every`; of one over several parameters none that has a value which no
    other has. By chance, but the same whenever they are asked for."""
    left = sorted(instances, key=lambda item: sha256(item.nodeid.encode()).digest())
    # Names that are given together have the same place in all instances, and are one parameter.
    together = {_places([item.callspec.params[name] for item in left]): name for name in left[0].callspec.params}
    values = {
        item: {*zip(together.values(), places, strict=True)} for item, *places in zip(left, *together, strict=True)
    }
    seen: set[tuple[str, int]] = set()
    taken = 0
    while left:
        best = max(left, key=lambda item: len(values[item] - seen))
        if taken >= len(instances) / every and (len(together) == 1 or values[best] <= seen):
            break
        seen |= values[best]
        left.remove(best)
        taken += 1
    return left
