"""Changes single decisions of a candidate by chance: the schedule of a tensor, the option of a block."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from planner.candidate.candidate import Candidate, Side, TensorSchedule, movable
from planner.candidate.setting import Setting
from planner.ilp.columns import limits_of
from planner.ilp.instance import make_instance
from planner.schedule.chain import Tensor
from planner.search.placements import Placement, in_their_stages

_OPTIONS = 0.2  # share of the changes that are of options, where there are also tensors to change


class Decisions:
    """The decisions of one setting that may be changed; false where there is none."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        chain = setting.chain
        self.tensors = [(i, t) for i, ts in enumerate(movable(chain, setting.hardware)) for t in ts if t.bytes]
        self.blocks = [i for i, block in enumerate(chain.blocks) if len(setting.options(block)) > 1]
        self.limits = limits_of(make_instance(setting))

    def __bool__(self) -> bool:
        return bool(self.tensors or self.blocks)

    def changed(self, candidate: Candidate, chance: Random) -> Candidate:
        """The candidate with one to three decisions changed."""
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
        """All schedules that a tensor of block `i` could have."""
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
        if tensor.wholly_on_disk:  # where the device updates it, it stays
            placements = [p for p in placements if p.side is Side.CPU or p == placement]
        return in_their_stages(self.setting, placements)
