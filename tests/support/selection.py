"""Which tests take long: `make test-fast` leaves the slow ones out, `make test` of sweeps what only repeats.

`slow` are the files of `tests/slow.txt`, and tests with that mark. `long` are tests that only `make test-all` runs:
those with that mark, and what a `sweep(n)` leaves out. Of the instances of a sweep one in n stays, and more where else
a value of one of several parameters would be missing. Sweeps are over seeds and crossed parameters; of instances that
are features of their own none is left out.

Long is what tries once more, for longer, on a late device or in a crossing, what another test tries. A test without
which some line would not run, or which alone looks at a promise, is not long.
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import sha256

import pytest

from tests import ROOT

LIST = ROOT / "tests" / "slow.txt"


def mark(items: list[pytest.Item]) -> None:
    """Mark what is slow and what is long, and let the slow ones begin: the last tests are then short."""
    slow = {ROOT / "tests" / name for name in LIST.read_text().split()}
    assert all(path.exists() for path in slow), f"{LIST} names what is not there"
    sweeps: dict[tuple[str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if not slow.isdisjoint((item.path, *item.path.parents)):
            item.add_marker(pytest.mark.slow)
        if (sweep := item.get_closest_marker("sweep")) is not None and isinstance(item, pytest.Function):
            sweeps[item.nodeid.partition("[")[0], *sweep.args].append(item)
    for (_, every), instances in sweeps.items():
        for item in repeats(instances, every):
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


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
