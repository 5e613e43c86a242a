"""What may be decided anew: the journeys a tensor could have, the options of a block."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from planner.draft.draft import Draft, Journey, Side, movable
from planner.draft.setting import Setting
from planner.ilp.columns import limits_of
from planner.ilp.instance import make_instance
from planner.schedule.chain import Tensor
from planner.search.fates import Fate, in_their_stages

_OPTIONS = 0.2  # share of the changes, where there are tensors, too


class Decisions:
    """The decisions of one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        chain = setting.chain
        self.tensors = [(i, t) for i, ts in enumerate(movable(chain, setting.hardware)) for t in ts if t.bytes]
        self.blocks = [i for i, block in enumerate(chain.blocks) if len(setting.options(block)) > 1]
        self.limits = limits_of(make_instance(setting))

    def __bool__(self) -> bool:
        return bool(self.tensors or self.blocks)

    def changed(self, draft: Draft, chance: Random) -> Draft:
        """The draft with one to three decisions changed."""
        for _ in range(chance.choice((1, 1, 2, 2, 3))):
            draft = self._once(draft, chance)
        return draft

    def _once(self, draft: Draft, chance: Random) -> Draft:
        if self.blocks and (not self.tensors or chance.random() < _OPTIONS):
            i = chance.choice(self.blocks)
            name = chance.choice(self.setting.options(self.setting.chain.blocks[i])).name
            return replace(draft, options=(*draft.options[:i], name, *draft.options[i + 1 :]))
        i, tensor = chance.choice(self.tensors)
        journey = chance.choice(self._journeys(i, tensor))
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
        return in_their_stages(self.setting, fates)
