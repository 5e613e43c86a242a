"""What becomes of a draft: its step played, single decisions taken anew, and its stages moved, as long as that gains.

The played draft is played again, in another manner: what it has moved frees room elsewhere. Then decisions change by
chance that is the same every time: another journey for a tensor, another option for a block; the step is played anew.
At last what the step hangs on moves: fetches a stage sooner, releases a stage later. Nothing is
counted in seconds, so that a plan does not depend on how busy the machine is.
"""

from __future__ import annotations

from random import Random

from planner.draft.absences import with_lead
from planner.draft.draft import Draft
from planner.draft.evaluate import Evaluation, evaluate
from planner.draft.setting import Setting
from planner.search.decisions import Decisions
from planner.search.list_schedule import Manner, timed
from planner.search.moves import Board
from planner.search.repair import tightened

_FIRST = (Manner(overtake=True), Manner(ahead=0.3))
_NEXT = tuple(Manner(ahead=ahead, overtake=overtake) for ahead in (1.0, 2.0, 0.6) for overtake in (False, True))
_LIGHT = 3_500  # operations; decisions are tried as often as the square of how much lighter a draft is
_IDLE = 8  # moves without gain

_Found = tuple[Draft, Evaluation]


def improved(setting: Setting, draft: Draft, goal_s: float) -> Draft:
    """The fastest found, `draft` itself where none is faster; `draft` fits. No need to look for less than `goal_s`."""
    best = draft, evaluate(setting, draft)
    for change in (_played, _decided, _moved) if setting.rounds == 1 else (_moved,):
        best = change(setting, best, goal_s)
    return best[0]


def _fitted(setting: Setting, draft: Draft) -> _Found | None:
    """The draft, tightened where it has to be; None where it does not fit."""
    seen = evaluate(setting, draft)
    if not seen.fits:
        draft = tightened(setting.chain, draft, seen.room_bytes)
        seen = evaluate(setting, draft)
    return (draft, seen) if seen.fits else None


def _play(setting: Setting, start: _Found, manner: Manner) -> _Found | None:
    draft, seen = start
    return _fitted(setting, timed(setting, draft, seen.plan, seen.room_bytes, manner))


def _better(best: _Found, found: _Found | None) -> _Found:
    return found if found is not None and found[1].fits and found[1].step_s < best[1].step_s else best


def _played(setting: Setting, best: _Found, goal_s: float) -> _Found:
    """The best of a few plays, from three starts and then from the best so far."""
    for start in (best[0], with_lead(setting, best[0], 1)):
        base = _fitted(setting, start)
        for manner in _FIRST:
            if base is not None and best[1].step_s > goal_s:
                best = _better(best, _play(setting, base, manner))
    for manner in _NEXT:
        if best[1].step_s > goal_s:
            best = _better(best, _play(setting, best, manner))
    return best


def _decided(setting: Setting, best: _Found, goal_s: float) -> _Found:
    """The best after some changes of one to three decisions each, as they stand or played."""
    decisions, chance = Decisions(setting), Random(0)
    for _ in range((_LIGHT // max(1, best[1].operations)) ** 2 if decisions else 0):
        if best[1].step_s <= goal_s:
            break
        found = _fitted(setting, decisions.changed(best[0], chance))
        if found is not None:
            best = _better(best, found)
            best = _better(best, _play(setting, found, chance.choice((*_FIRST, Manner()))))
    return best


def _moved(setting: Setting, best: _Found, goal_s: float) -> _Found:
    """The best after moving all that the step hangs on by a stage where there is room for it, over and over."""
    board = Board(setting, best[0])
    best_s, drafts, left = best[1].step_s, [best[0]], _IDLE
    while left and best_s > goal_s:
        left -= 1
        moves = board.critical()
        for n, place in moves:
            board.put_if_room(n, place)
        found_s = board.step_s()
        if found_s < best_s:
            best_s, left = found_s, _IDLE
            drafts.append(board.drafted())
        if not moves:
            break
    found = drafts[-1]
    return _better(best, (found, evaluate(setting, found))) if len(drafts) > 1 else best
