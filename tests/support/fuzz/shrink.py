"""The simplest case that fails as another does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.support.fuzz.case import Case
from tests.support.fuzz.trial import Verdict

PLAIN: dict[str, Any] = {
    "frozen": "",
    "bf16": False,
    "clip": None,
    "groups": 1,
    "steps": 1,
    "slices": 1,
    "layers": 2,
    "shape": (1, 8),
    "width": 8,
    "share": 1.0,
}


def shrink(case: Case, judge: Callable[[Case], Verdict]) -> tuple[Case, Verdict]:
    """Leaves away what is not needed for a verdict of the same kind, one thing after another."""
    verdict = judge(case)
    found = True
    while found:
        found = False
        for simpler in _simpler(case):
            other = judge(simpler)
            if other.kind == verdict.kind:
                case, verdict, found = simpler, other, True
                break
    return case, verdict


def _simpler(case: Case) -> Iterator[Case]:
    if case.features:
        yield replace(case, features=frozenset())
    if len(case.patterns) > 1:
        yield from (replace(case, patterns=(pattern,)) for pattern in case.patterns)
    for number, pattern in enumerate(case.patterns):
        for place in range(len(pattern)):
            fewer = pattern[:place] + pattern[place + 1 :]
            yield replace(case, patterns=(*case.patterns[:number], fewer, *case.patterns[number + 1 :]))
    yield from (replace(case, features=case.features - {name}) for name in sorted(case.features))
    yield from (replace(case, **{name: value}) for name, value in PLAIN.items() if getattr(case, name) != value)
