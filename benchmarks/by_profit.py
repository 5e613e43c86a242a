"""Weights to take off the device by profit, and when: algorithms 1 and 2 of "Weight offloading strategies" (paper 004).

The paper's problem: weights of whole blocks may be away after their forward ("(k, 1)") or after their backward
("(k, 0)"); states stay; every update is on the device. Algorithm 1 takes the choice with the greatest profit, bytes of
excess removed over all stages per byte moved, until nothing is too much. Algorithm 2 schedules: sends first in, first
out, fetches in the order of their use, each as early as memory allows. Here times are stages, the unit of a `Plan`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from planner.draft.draft import Draft, Journey, Side, Trip, assemble, at_home, backward_stage, movable
from planner.draft.setting import Setting
from planner.greedy.streaming import resident
from planner.schedule.chain import Tensor
from planner.schedule.compile import OpKind, order_program
from planner.schedule.memory import gpu_usage
from planner.schedule.simulate import durations_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Block `block` is away after its forward, or after its backward: the paper's (k, 1), (k, 0)."""

    block: int
    after_forward: bool


@dataclass(slots=True)
class _Leg:
    """One choice on its way: last read at stage `start`, next one at `end`, in stages that go on counting past T."""

    choice: Choice
    start: int
    end: int
    send: int | None = None
    evict: int = 0
    prefetch: int = 0


class _Search:
    """The stages' memory and durations with everything on the device, and what the choices take off."""

    def __init__(self, setting: Setting, options: Sequence[str]) -> None:
        self.setting, self.options = setting, options
        chain = setting.chain
        self.stages = 2 * len(chain.blocks) - 1
        self.tensors: list[list[Tensor]] = movable(chain, setting.hardware)
        self.bytes = [sum(t.bytes for t in tensors) for tensors in self.tensors]
        plan = assemble(
            chain, resident(setting, options, "resident"), slices=setting.slices, rounds=setting.rounds,
            clip=setting.clip,
        )  # fmt: skip
        program = order_program(plan, chain)
        number = {stage.name: s for s, stage in enumerate(plan.stages)}
        self.peak = [0] * self.stages
        self.seconds = [0.0] * self.stages
        for usage in gpu_usage(program, chain):
            s = number[usage.op.stage]
            self.peak[s] = max(self.peak[s], usage.peak_bytes)
        for op, seconds in zip(program.ops, durations_s(program, chain, setting.hardware), strict=True):
            if op.kind in (OpKind.RUN, OpKind.UPDATE):
                self.seconds[number[op.stage]] += seconds

    def gap(self, choice: Choice) -> tuple[int, int]:
        """The stages that read the weight before and after the absence."""
        backward = backward_stage(self.setting.chain, choice.block)
        return (choice.block, backward) if choice.after_forward else (backward, choice.block + self.stages)

    def covered(self, choice: Choice) -> list[int]:
        """Stages between the two."""
        start, end = self.gap(choice)
        return [s % self.stages for s in range(start + 1, end)]

    def choices(self, spare: int) -> list[Choice] | None:
        """Algorithm 1, with room for `spare` more weights like that of the running block. None where all choices
        together do not suffice."""
        blocks = [*range(len(self.bytes)), *reversed(range(len(self.bytes) - 1))]
        excess = [
            max(0, peak + spare * self.bytes[i] - self.setting.budgets.gpu_bytes)
            for i, peak in zip(blocks, self.peak, strict=True)
        ]
        left = [
            choice
            for k in range(len(self.bytes))
            for choice in (Choice(block=k, after_forward=True), Choice(block=k, after_forward=False))
            if self.bytes[k] and self.covered(choice)
        ]
        chosen: dict[Choice, None] = {}
        # Profits only fall: the one at the top is worked out anew. But when one choice of a block is made, the other's
        # rises, and is put in once more.
        profits = [(-self._profit(choice, excess, chosen), n) for n, choice in enumerate(left)]
        heapify(profits)
        while max(excess) > 0:
            if not profits:
                return None
            profit, n = heappop(profits)
            if left[n] in chosen:
                continue
            now = -self._profit(left[n], excess, chosen)
            if now > profit:
                heappush(profits, (now, n))
                continue
            if now == 0:
                return None
            best = left[n]
            chosen[best] = None
            for s in self.covered(best):
                excess[s] = max(0, excess[s] - self.bytes[best.block])
            other = Choice(block=best.block, after_forward=not best.after_forward)
            if other not in chosen and other in left:
                heappush(profits, (-self._profit(other, excess, chosen), left.index(other)))
        return list(chosen)

    def _profit(self, choice: Choice, excess: list[int], chosen: Container[Choice]) -> float:
        size = self.bytes[choice.block]
        both = Choice(block=choice.block, after_forward=not choice.after_forward) in chosen
        moved = size if both else 2 * size  # one copy to the host serves both absences
        return sum(min(excess[s], size) for s in self.covered(choice)) / moved

    def legs(self, chosen: list[Choice]) -> list[_Leg]:
        """Algorithm 2: the legs with their stages."""
        room = [self.setting.budgets.gpu_bytes - peak for peak in self.peak]
        legs = [_Leg(choice, *self.gap(choice)) for choice in chosen]
        for leg in legs:
            for s in self.covered(leg.choice):
                room[s] += self.bytes[leg.choice.block]
        self._send(legs, room)
        self._fetch(legs, room)
        return legs

    def _send(self, legs: list[_Leg], room: list[int]) -> None:
        """First in, first out from the head's backward on; a weight stays until it has been sent, if there is room."""
        head, ends = self._ends()
        after_backward = {leg.choice.block for leg in legs if not leg.choice.after_forward}
        free_s = 0.0
        for leg in sorted(legs, key=lambda leg: (leg.start - head) % self.stages):
            leg.evict = leg.start
            if leg.choice.after_forward and leg.choice.block in after_backward:
                continue  # the copy made after backward is still right
            leg.send = leg.start
            free_s = max(free_s, ends[leg.start % self.stages])
            free_s += self.bytes[leg.choice.block] / self.setting.hardware.d2h_bytes_per_s
            while leg.evict + 1 < leg.end and room[(leg.evict + 1) % self.stages] >= self.bytes[leg.choice.block]:
                if self._end_s(leg.evict - leg.start, leg.start, ends) >= free_s:
                    break
                leg.evict += 1
                room[leg.evict % self.stages] -= self.bytes[leg.choice.block]

    def _ends(self) -> tuple[int, list[float]]:
        """The head's stage, and the end of each stage after it in seconds from its start, nothing waiting."""
        head = (self.stages - 1) // 2
        ends, now = [0.0] * self.stages, 0.0
        for n in range(self.stages):
            now += self.seconds[(head + n) % self.stages]
            ends[(head + n) % self.stages] = now
        return head, ends

    def _end_s(self, ahead: int, start: int, ends: list[float]) -> float:
        """When the stage `ahead` after `start` ends."""
        later = [self.seconds[(start + n) % self.stages] for n in range(1, ahead + 1)]
        return ends[start % self.stages] + sum(later)

    def _fetch(self, legs: list[_Leg], room: list[int]) -> None:
        """In the order of their use, none before the one that is used earlier, as early as there is room."""
        head = (self.stages - 1) // 2
        earliest = 0
        for leg in sorted(legs, key=lambda leg: (leg.end - head) % self.stages or self.stages):
            turn = self.stages * ((leg.end - head - 1) // self.stages)  # stages of the cycle that starts at the head
            leg.prefetch = leg.end
            floor = max(leg.evict + 1, earliest + turn)
            while leg.prefetch > floor and room[(leg.prefetch - 1) % self.stages] >= self.bytes[leg.choice.block]:
                leg.prefetch -= 1
                room[leg.prefetch % self.stages] -= self.bytes[leg.choice.block]
            earliest = leg.prefetch - turn

    def draft(self, legs: list[_Leg]) -> Draft:
        """The legs as journeys; all else stays at home."""
        chain, clip = self.setting.chain, self.setting.clip
        trips: dict[int, list[Trip]] = {}
        for leg in sorted(legs, key=lambda leg: leg.start):
            offload = None if leg.send is None else leg.send % self.stages
            trip = Trip(evict=leg.evict % self.stages, prefetch=leg.prefetch % self.stages, offload=offload)
            trips.setdefault(leg.choice.block, []).append(trip)
        journeys = {t.name: at_home(chain, t, clip) for t in chain.tensors()}
        for block, absences in trips.items():
            for tensor in self.tensors[block]:
                journeys[tensor.name] = self._journey(tensor, block, tuple(absences))
        return Draft(options=tuple(self.options), journeys=tuple(journeys.values()), source="by profit")

    def _journey(self, tensor: Tensor, block: int, trips: tuple[Trip, ...]) -> Journey:
        if not tensor.trainable:
            return Journey(tensor=tensor, side=Side.NOBODY, weight=tuple(_unsent(trips)))
        return Journey(tensor=tensor, side=Side.GPU, update=backward_stage(self.setting.chain, block), weight=trips)


def _unsent(trips: Sequence[Trip]) -> Iterator[Trip]:
    """Frozen weights never change: the host's copy is always right."""
    for trip in trips:
        yield Trip(evict=trip.evict, prefetch=trip.prefetch)


def by_profit(setting: Setting, options: Sequence[str], *, spare: int) -> Draft | None:
    """The greedy plan of paper 004 with these options; None where weights alone cannot make it fit.

    `spare`: weights that algorithm 1 makes room for beyond what is read. The paper's formula has one, so that the next
    weight can come; a stage here holds also the one that leaves until its end: 2. With clipping there is no such plan:
    the update waits for the norm with its weight on the device.
    """
    if setting.clip:
        return None
    search = _Search(setting, options)
    chosen = search.choices(spare)
    return None if chosen is None else search.draft(search.legs(chosen))
