"""Improves a candidate as long as its step gets shorter: simulates its step, changes single decisions, and moves
transfers to other stages.

A candidate is simulated with several rules for the link, since each simulation frees room elsewhere. Where it is still
far from the integer program's step, random decisions change, with a fixed seed: a tensor gets another schedule or a
block another option, and the step is simulated again. At last the operations on the critical path move: fetches a stage
earlier, releases a stage later. No limit is in seconds, so a plan does not depend on how busy the machine is.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from planner.candidate.absence_windows import with_lead
from planner.candidate.candidate import Candidate, Side, TensorSchedule, movable
from planner.candidate.evaluate import Evaluation, evaluate
from planner.candidate.setting import Setting
from planner.ilp.columns import limits_of
from planner.ilp.instance import make_instance
from planner.schedule.chain import Tensor
from planner.search.list_schedule import Manner, timed
from planner.search.moves import Board
from planner.search.placements import Placement, in_their_stages
from planner.search.repair import tightened

_FIRST = (Manner(overtake=True), Manner(ahead=0.3))
_NEXT = tuple(Manner(ahead=ahead, overtake=overtake) for ahead in (1.0, 2.0, 0.6) for overtake in (False, True))
_LIGHT = 3_500  # operations: for n operations, (_LIGHT / n) ** 2 changes are tried
_TRIES = 300  # at most
_COPY_TURNS = (2, 3)


def improved(setting: Setting, seen: Evaluation, goal_s: float, near_s: float) -> Evaluation:
    """Return the fastest variant found of a candidate plan (`seen`), evaluated; `seen` itself where none is faster. It
    fits the budgets. The search ends when a step takes at most `goal_s` seconds; random changes already end at `near_s`
    seconds."""
    seen = _with_longer_copies(setting, seen, goal_s)
    if setting.rounds == 1:
        seen = _decided(setting, _played(setting, seen, goal_s), near_s)
        seen = _with_longer_copies(setting, seen, goal_s)  # what else is waited for is less now
    return _moved(setting, seen, goal_s)


def _fitted(setting: Setting, candidate: Candidate) -> Evaluation | None:
    """Return the candidate evaluated, changed to need less memory where it does not fit; None where it does not fit
    even then."""
    seen = evaluate(setting, candidate)
    if not seen.fits:
        seen = evaluate(setting, tightened(setting.chain, candidate, seen.room_bytes))
    return seen if seen.fits else None


def _with_longer_copies(setting: Setting, best: Evaluation, goal_s: float) -> Evaluation:
    """Return the best of the candidate and those in which activations are copied for more turns, up to a whole stage:
    the device waits less for the copies, and needs more memory."""
    chosen = zip(setting.chain.blocks, best.candidate.options, strict=True)
    if not any(block.option(name).offloaded_bytes for block, name in chosen):
        return best
    for turns in (*_COPY_TURNS, setting.slices):
        if best.step_s > goal_s and turns > best.candidate.copy_turns:
            best = _better(best, _fitted(setting, replace(best.candidate, copy_turns=turns)))
    return best


def _play(setting: Setting, start: Evaluation, manner: Manner, before: set[Candidate]) -> Evaluation | None:
    """Return the candidate with the stages that a simulation chooses, evaluated. None where it does not fit, or where
    the simulation gives a candidate in `before`, as it often does."""
    candidate = timed(setting, start.candidate, start.plan, start.room_bytes, manner)
    if candidate in before:
        return None
    before.add(candidate)
    return _fitted(setting, candidate)


def _better(best: Evaluation, found: Evaluation | None) -> Evaluation:
    return found if found is not None and found.fits and found.step_s < best.step_s else best


def _played(setting: Setting, best: Evaluation, goal_s: float) -> Evaluation:
    """Return the best of a few simulations: from two starts, then from the best so far."""
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
    """Return the best after random changes of one to three decisions each. Each is evaluated as it is, and after one
    simulation."""
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
    """Return the best after moving everything on the critical path by a stage, where the device has room for it, as
    long as that makes the step shorter."""
    board = Board(setting, best)
    best_s, candidate = best.step_s, best.candidate
    while best_s > goal_s:
        for n, place in board.critical():
            board.put_if_room(n, place)
        found_s = board.step_s()
        if found_s >= best_s:
            break
        best_s, candidate = found_s, board.proposed()
    return best if candidate is best.candidate else _better(best, evaluate(setting, candidate))


# ---- changes single decisions of a candidate by chance: the schedule of a tensor, the option of a block


_OPTIONS = 0.2  # the share of changes that concern a block's option, where tensors can change, too


class Decisions:
    """The decisions in a candidate plan that can be changed: the schedules of tensors, and the options of blocks, which
    say which activations these keep. False where there are none."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        chain = setting.chain
        self.tensors = [(i, t) for i, ts in enumerate(movable(chain, setting.hardware)) for t in ts if t.bytes]
        self.blocks = [i for i, block in enumerate(chain.blocks) if len(setting.options(block)) > 1]
        self.limits = limits_of(make_instance(setting))

    def __bool__(self) -> bool:
        return bool(self.tensors or self.blocks)

    def changed(self, candidate: Candidate, chance: Random) -> Candidate:
        """Return the candidate plan with one to three decisions, chosen at random by `chance`, changed."""
        for _ in range(chance.choice((1, 1, 2, 2, 3))):
            candidate = self._once(candidate, chance)
        return candidate

    def _once(self, candidate: Candidate, chance: Random) -> Candidate:
        if self.blocks and (not self.tensors or chance.random() < _OPTIONS):
            i = chance.choice(self.blocks)
            name = chance.choice(self.setting.options(self.setting.chain.blocks[i])).name
            return replace(candidate, options=(*candidate.options[:i], name, *candidate.options[i + 1 :]))
        i, tensor = chance.choice(self.tensors)
        schedule = chance.choice(self._schedules(i, tensor))
        schedules = tuple(schedule if j.tensor.name == tensor.name else j for j in candidate.schedules)
        return replace(candidate, schedules=schedules)

    def _schedules(self, i: int, tensor: Tensor) -> list[TensorSchedule]:
        """Return all schedules that a tensor of block `i` can have."""
        may = {kind: (False, True) if of[i] > 0 else (False,) for kind, of in self.limits.items()}
        placement = Placement(tensor=tensor, block=i, side=Side.GPU if tensor.trainable else Side.NOBODY)
        placements = [
            replace(placement, after_backward=backward, after_forward=forward, send=send, states_travel=states)
            for forward in may["E"]
            for backward in may["N" if tensor.trainable else "R"]
            for states in (may["Y"] if tensor.trainable else (False,))
            for send in (("K",) if tensor.trainable and forward and not backward else ("",))
        ]
        if tensor.trainable and True in may["X"]:
            on_cpu = replace(placement, side=Side.CPU, after_backward=True)
            placements += [replace(on_cpu, after_forward=forward) for forward in may["E"]]
        if tensor.wholly_on_disk:  # if the device updates it, it stays there
            placements = [p for p in placements if p.side is Side.CPU or p == placement]
        return in_their_stages(self.setting, placements)
