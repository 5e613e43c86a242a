"""A draft's copies, updates and releases a few stages sooner or later, by simulated annealing.

Playing (`planner.search.list_schedule`) serves every queue as well as it can where it stands, and never waits a little
now to gain more later. Where tensors are few and large, that is most of what whole tensors cost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from planner.draft.draft import Draft
from planner.draft.evaluate import Look
from planner.draft.setting import Setting
from planner.search.stage_model import Board, Place

_HEAT = 0.002  # of a step: what a change may lose at first; in the end nothing
_FAR = (-3, -2, -1, -1, 1, 1, 2, 3)  # stages
_AT_ONCE = (1, 1, 2, 3)


def shifted(
    setting: Setting, draft: Draft, look: Callable[[Draft], Look], *, attempts: int, go_on: Callable[[float], bool]
) -> Draft:
    """The fastest found in so many attempts, `draft` itself where none is faster; ends when `go_on(step_s)` says so.
    For a draft that fits, of a step of one round that does not wait for a norm.
    """
    seen = look(draft)
    board, chance = Board(setting, draft, seen.plan, seen.room_bytes), random.Random(0)
    moves = moves_of(board)
    now_s = best_s = board.step_s()
    best = [*board.places]
    for number in range(attempts if moves else 0):
        if not go_on(best_s):
            break
        before: list[tuple[int, Place]] = []
        for n, place in changes(board, moves, chance, chance.choice(_AT_ONCE)):
            before.append((n, board.places[n]))
            board.put(n, place)
        found_s = board.step_s() if before and min(board.room) >= 0 else math.inf
        heat_s = _HEAT * best_s * (1 - number / attempts)
        if found_s <= now_s or chance.random() < math.exp((now_s - found_s) / heat_s):
            now_s = found_s
            if now_s < best_s:
                best_s, best = now_s, [*board.places]
        else:
            for n, place in reversed(before):
                board.put(n, place)
    for n, place in enumerate(best):
        board.put(n, place)
    found = board.drafted()
    after = look(found)
    return found if after.fits and after.step_s < seen.step_s else draft


def moves_of(board: Board) -> list[tuple[int, str]]:
    """Legs by number, and what of them may be in another stage; fetches are tried more often, as most wait for them."""
    moves = []
    for n, leg in enumerate(board.legs):
        moves += [(n, what) for what in ("sent", "evict") if leg.copy is not None]
        moves += [(n, "fetch")] * 2 * (not leg.is_gradient)
        moves += [(n, "update")] * (leg.update_s > 0)
    return moves


def changes(
    board: Board, moves: Sequence[tuple[int, str]], chance: random.Random, count: int
) -> Iterator[tuple[int, Place]]:
    """Legs and where else they may be, at most so many, each after the one before has been put there."""
    for n, what in chance.choices(moves, k=count):
        old = board.places[n]
        place = replace(old, **{what: getattr(old, what) + chance.choice(_FAR)})
        if what == "sent":
            place = replace(place, evict=max(place.evict, place.sent))
        elif what == "evict":
            place = replace(place, sent=min(place.sent, place.evict))
        if board.allows(n, place):
            yield n, place
