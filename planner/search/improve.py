"""Improves a candidate: plays its step, takes single decisions anew, and moves its stages, as long as that gains.

A played candidate is played again in another manner, since what it has moved frees room elsewhere. Where it is still
far from the step that the solver hoped for, decisions change by a chance that is the same every time: a tensor gets
another schedule or a block another option, and the step is played anew. At last the operations on the critical path
move: fetches a stage sooner, releases a stage later. No limit is in seconds, so that a plan does not depend on how busy
the machine is.
"""

from __future__ import annotations

from random import Random

from planner.candidate.candidate import Candidate
from planner.candidate.evaluate import Evaluation, evaluate
from planner.candidate.setting import Setting
from planner.candidate.windows import with_lead
from planner.search.decisions import Decisions
from planner.search.list_schedule import Manner, timed
from planner.search.moves import Board
from planner.search.repair import tightened

_FIRST = (Manner(overtake=True), Manner(ahead=0.3))
_NEXT = tuple(Manner(ahead=ahead, overtake=overtake) for ahead in (1.0, 2.0, 0.6) for overtake in (False, True))
_LIGHT = 3_500  # operations; decisions are tried (this / a candidate's operations) squared times
_TRIES = 300  # at most
_IDLE = 8  # moves without gain


def improved(setting: Setting, seen: Evaluation, goal_s: float, near_s: float) -> Evaluation:
    """The fastest evaluation found, `seen` itself where none is faster; it fits. The search ends when a step is not
    above `goal_s`, the changes by chance when it is not above `near_s`."""
    if setting.rounds == 1:
        seen = _decided(setting, _played(setting, seen, goal_s), near_s)
    return _moved(setting, seen, goal_s)


def _fitted(setting: Setting, candidate: Candidate) -> Evaluation | None:
    """The candidate evaluated, tightened where it does not fit; None where it does not fit even then."""
    seen = evaluate(setting, candidate)
    if not seen.fits:
        seen = evaluate(setting, tightened(setting.chain, candidate, seen.room_bytes))
    return seen if seen.fits else None


def _play(setting: Setting, start: Evaluation, manner: Manner, before: set[Candidate]) -> Evaluation | None:
    """The candidate played and evaluated. None where it does not fit, and where playing gives one that was played
    `before`, as it often does."""
    candidate = timed(setting, start.candidate, start.plan, start.room_bytes, manner)
    if candidate in before:
        return None
    before.add(candidate)
    return _fitted(setting, candidate)


def _better(best: Evaluation, found: Evaluation | None) -> Evaluation:
    return found if found is not None and found.fits and found.step_s < best.step_s else best


def _played(setting: Setting, best: Evaluation, goal_s: float) -> Evaluation:
    """The best of a few plays: from two starts, then from the best so far."""
    led = _fitted(setting, with_lead(setting, best.candidate, 1))
    before: set[Candidate] = set()
    for start in (best, led):
        for manner in _FIRST:
            if start is not None and best.step_s > goal_s:
                best = _better(best, _play(setting, start, manner, before))
    for manner in _NEXT:
        if best.step_s > goal_s:
            best = _better(best, _play(setting, best, manner, before))
    return best


def _decided(setting: Setting, best: Evaluation, near_s: float) -> Evaluation:
    """The best after some changes of one to three decisions each, each evaluated as it is and once played."""
    if best.step_s <= near_s or not (decisions := Decisions(setting)):
        return best
    chance, before = Random(0), set[Candidate]()
    for _ in range(min(_TRIES, (_LIGHT // max(1, best.operations)) ** 2)):
        if best.step_s <= near_s:
            break
        found = _fitted(setting, decisions.changed(best.candidate, chance))
        if found is not None:
            best = _better(best, found)
            best = _better(best, _play(setting, found, chance.choice((*_FIRST, Manner())), before))
    return best


def _moved(setting: Setting, best: Evaluation, goal_s: float) -> Evaluation:
    """The best after moving all that is on the critical path by a stage, where there is room for it, over and over."""
    board = Board(setting, best)
    best_s, candidate, left = best.step_s, best.candidate, _IDLE
    while left and best_s > goal_s:
        left -= 1
        moves = board.critical()
        for n, place in moves:
            board.put_if_room(n, place)
        found_s = board.step_s()
        if found_s < best_s:
            best_s, candidate, left = found_s, board.proposed(), _IDLE
        if not moves:
            break
    return best if candidate is best.candidate else _better(best, evaluate(setting, candidate))
