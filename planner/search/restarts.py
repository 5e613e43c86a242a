"""The best of what playing makes of a draft: see `planner.search.list_schedule`.

The played draft is played again, in another manner: what it has moved frees room elsewhere. A few manners are tried
from the start, then, by chance (the same every time), from the best so far.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from planner.draft.absences import with_lead
from planner.draft.draft import Draft
from planner.draft.evaluate import Look
from planner.draft.setting import Setting
from planner.search.list_schedule import Manner, timed
from planner.search.repair import tightened

_AHEAD = (0.0, 0.0, 0.1, 0.2, 0.3, 0.6, 1.0, 2.0)
_FIRST = (Manner(overtake=True), Manner(ahead=0.3))


def improved(
    setting: Setting, draft: Draft, look: Callable[[Draft], Look], *, attempts: int, go_on: Callable[[float], bool]
) -> Draft:
    """The fastest found in so many attempts, `draft` itself where none is faster; ends when `go_on(step_s)` says so."""
    search = Climb(setting, draft, look)
    for start in (draft, with_lead(setting, draft, 1), with_lead(setting, draft, 0)):
        base = search.fitted(start)
        for manner in _FIRST:
            if base is not None and go_on(search.step_s):
                search.play(base, manner)
    chance = random.Random(0)
    for _ in range(attempts):
        if not go_on(search.step_s):
            break
        search.play((search.draft, search.seen), Manner(ahead=chance.choice(_AHEAD), overtake=chance.random() < 0.5))
    return search.draft


class Climb:
    """The best draft so far, and how to try for a better one."""

    def __init__(self, setting: Setting, draft: Draft, look: Callable[[Draft], Look]) -> None:
        self.setting, self.look = setting, look
        self.draft, self.seen = draft, look(draft)

    @property
    def step_s(self) -> float:
        """Of the best."""
        return self.seen.step_s

    def fitted(self, draft: Draft) -> tuple[Draft, Look] | None:
        """The draft, tightened where it has to be; None where it does not fit."""
        seen = self.look(draft)
        if not seen.fits:
            draft = tightened(self.setting.chain, draft, seen.room_bytes)
            seen = self.look(draft)
        return (draft, seen) if seen.fits else None

    def play(self, start: tuple[Draft, Look], manner: Manner) -> tuple[Draft, Look] | None:
        """Play a draft that fits; the best is what is faster. None where it fits no more."""
        draft, seen = start
        found = self.fitted(timed(self.setting, draft, seen.plan, seen.room_bytes, manner))
        if found is not None:
            self.take(found)
        return found

    def take(self, found: tuple[Draft, Look]) -> None:
        """The best is what is faster; `found` fits."""
        if found[1].step_s < self.step_s:
            self.draft, self.seen = found
