"""Other fates for single tensors, other options for single blocks, as long as the step gets shorter.

The solver splits tensors at will. Where a chain has few of them, its answer in whole tensors may be far from the best
of those. Here one or two decisions of the best draft at a time are changed by chance (the same every time), the others
stay where they are or the step is played, and what comes near is shifted; what is better is kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from planner.draft.absences import with_lead
from planner.draft.draft import Draft, Journey, Side, movable
from planner.draft.evaluate import Look
from planner.draft.setting import Setting
from planner.ilp.columns import limits_of
from planner.ilp.instance import make_instance
from planner.schedule.chain import Tensor
from planner.search.anneal import shifted
from planner.search.list_schedule import Manner
from planner.search.place_transfers import Fate, in_their_stages
from planner.search.restarts import Climb

_PER_CHOICE, _LEAST = 8, 80  # attempts: for each tensor and block, in all
_WORK = 7000  # attempts times choices: a long chain takes long to play
_NEAR = 1.1  # times the best step: more is too much to be shifted away
_MANNERS = (Manner(), Manner(overtake=True), Manner(ahead=0.3), Manner(ahead=2.0))


def exchanged(
    setting: Setting,
    draft: Draft,
    look: Callable[[Draft], Look],
    *,
    attempts: int,
    shifts: int,
    go_on: Callable[[float], bool],
) -> Draft:
    """The fastest found in so many attempts, each with so many `shifts`, `draft` itself where none is faster."""
    best, changes = Climb(setting, draft, look), _Changes(setting)
    choices = len(changes.tensors) + len(changes.blocks)
    if choices == 0:
        return draft
    for _ in range(min(attempts, max(_LEAST, _PER_CHOICE * choices), _WORK // choices)):
        if not go_on(best.step_s):
            break
        changed = changes.of(best.draft)
        start = best.fitted(with_lead(setting, changed, changes.chance.choice((1, 1, 0))))
        manner = changes.chance.choice(_MANNERS)
        ways = (best.fitted(changed), start, None if start is None else best.play(start, manner))
        found = min((way for way in ways if way is not None), key=lambda way: way[1].step_s, default=None)
        if found is None:
            continue
        if shifts and found[1].step_s < _NEAR * best.step_s:
            moved = shifted(setting, found[0], look, attempts=shifts, go_on=go_on)
            found = moved, look(moved)
        best.take(found)
    return best.draft


class _Changes:
    """What may be changed: the journeys a tensor could have, the options of a block."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.chance = setting, random.Random(0)
        chain = setting.chain
        self.tensors = [(i, t) for i, ts in enumerate(movable(chain, setting.hardware)) for t in ts if t.bytes]
        self.blocks = [i for i, block in enumerate(chain.blocks) if len(setting.options(block)) > 1]
        instance = make_instance(
            chain, setting.hardware, budgets=setting.budgets, slices=setting.slices, clip=setting.clip
        )  # fmt: skip
        self.limits = limits_of(instance)

    def of(self, draft: Draft) -> Draft:
        """The draft with one or two decisions changed."""
        for _ in range(self.chance.choice((1, 1, 2, 2, 3))):
            draft = self._once(draft)
        return draft

    def _once(self, draft: Draft) -> Draft:
        if not self.tensors or (self.blocks and self.chance.random() < 0.2):
            i = self.chance.choice(self.blocks)
            name = self.chance.choice(self.setting.options(self.setting.chain.blocks[i])).name
            return replace(draft, options=(*draft.options[:i], name, *draft.options[i + 1 :]))
        i, tensor = self.chance.choice(self.tensors)
        journey = self.chance.choice(self._journeys(i, tensor))
        journeys = tuple(journey if j.tensor.name == tensor.name else j for j in draft.journeys)
        return replace(draft, journeys=journeys)

    def _journeys(self, i: int, tensor: Tensor) -> list[Journey]:
        """All that a tensor of block `i` could do."""
        may = {kind: (False, True) if of[i] > 0 else (False,) for kind, of in self.limits.items()}
        fate = Fate(tensor=tensor, block=i, side=Side.GPU if tensor.trainable else Side.NOBODY)
        fates = [
            replace(fate, after_backward=backward, after_forward=forward, send=send, states_travel=states)
            for forward in may["E"]
            for backward in may["N" if tensor.trainable else "R"]
            for states in (may["Y"] if tensor.trainable else (False,))
            for send in (("K",) if tensor.trainable and forward and not backward else ("",))
        ]
        if tensor.trainable and True in may["X"]:
            on_cpu = replace(fate, side=Side.CPU, after_backward=True)
            fates += [replace(on_cpu, after_forward=forward) for forward in may["E"]]
        return in_their_stages(self.setting.chain, fates, clip=self.setting.clip)
