"""When whole tensors move: a draft's step played through, every queue kept busy as long as there is memory.

The solver's stages are exact about sums and blind to what happens within and across them. Here the step is played in
time, stage by stage, by the rules of `planner.schedule.serial_order` and `planner.schedule.simulate`, and decisions are
made where they fall:

    host -> device  what is needed next comes next, as soon as the link has time for it and the budget room
    device -> host  gradients and what must leave go at once, other copies when the link has nothing else to do
    CPU             of the gradients that have come, that of the weight needed next
    release         when the copy is done; before that the device waits only where the next stage has no room

What moves at all is the draft's, and its peaks are kept free for it: what comes earlier or leaves later than there
takes of the rest of the budget. Three steps are played, the second is taken.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.draft.absences import Leg, legs_of
from planner.draft.draft import Draft, Journey, Trip
from planner.draft.setting import Setting
from planner.schedule.compile import reads
from planner.schedule.plan import Direction, Plan
from planner.schedule.serial_order import activation_turns

_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How the link to the device is served. `ahead`: it gets work until so many lengths of the running stage after its
    end, for the device may wait there. `overtake`: where there is no room for what is needed next, something smaller
    that is needed later may come first.
    """

    ahead: float = 0.0
    overtake: bool = False


@dataclass(slots=True)
class _Clock:
    """When the device and each queue are done with what they have."""

    now: float = 0.0
    h2d: float = 0.0
    d2h: float = 0.0
    cpu: float = 0.0
    activations: dict[str, float] = field(default_factory=dict)  # item -> when its last copy is done


def timed(setting: Setting, draft: Draft, plan: Plan, room_bytes: Sequence[int], manner: Manner) -> Draft:
    """The draft with the stages of its copies, updates and releases chosen by playing. `plan`: what it assembles to,
    in one round; `room_bytes`: what its stages leave free, none below zero.
    """
    play = _Play(setting, draft, plan, room_bytes, manner)
    for number in range(_STEPS * play.stages):
        play.stage(number)
    return play.draft()


class _Play:
    """Stages count on through the steps, seconds from the first."""

    def __init__(
        self, setting: Setting, draft: Draft, plan: Plan, room_bytes: Sequence[int], manner: Manner
    ) -> None:  # fmt: skip
        self.setting, self.source, self.plan, self.manner = setting, draft, plan, manner
        self.machine, self.stages = setting.hardware, len(plan.stages)
        self.room = [*room_bytes] * (_STEPS + 2)
        self.clock = _Clock()
        self.back_at, self.free_at = activation_turns(plan, setting.chain)
        self.reads = [
            {f"w:{name}" for name in reads(setting.chain, plan.options, stage.direction, stage.block)}
            for stage in plan.stages
        ]
        self.gpu_update_s = self._gpu_updates()
        self.back_s = self._activations_coming()
        self.coming: list[tuple[tuple[int, int], Leg]] = []  # away, the host's copy right or promised; by use
        self.here: list[Leg] = []  # came, not used yet
        self.gradients: list[tuple[tuple[int, int], Leg, Leg]] = []  # sent, not updated, with their weights; by use
        self.stale: dict[str, Leg] = {}  # tensor -> its weight, away, its gradient not sent yet
        self.lazy: list[Leg] = []  # copies that may wait
        self.staying: list[Leg] = []  # leave when their copies are done
        self.ending: list[list[Leg]] = [[] for _ in self.room]  # stage -> what has something to do at its end
        legs = legs_of(setting, draft)
        self.taken: list[Leg] = []
        for step in range(-1, _STEPS):
            moved = [leg.after(step * self.stages) for leg in legs]
            if step == 1:
                self.taken = moved
            for leg in moved:
                self._begin(leg)

    def _gpu_updates(self) -> list[float]:
        """Seconds of the device's updates at the end of each stage."""
        chain = self.setting.chain
        elements = {t.name: t.elements for t in chain.tensors()}
        parameters = [sum(elements[name] for name in stage.gpu_update) for stage in self.plan.stages]
        parameters[-1] += sum(t.elements for t in chain.frame_tensors if t.trainable)
        return [n / self.machine.gpu_update_parameters_per_s for n in parameters]

    def _activations_coming(self) -> list[float]:
        """Seconds of the link for activations that come back in each stage."""
        sizes = [0] * self.stages
        for turn, items in self.back_at.items():
            sizes[turn // self.plan.slices] += sum(size for _, size in items)
        return [size / self.machine.h2d_bytes_per_s for size in sizes]

    def _begin(self, leg: Leg) -> None:
        """What happened before the first stage went by the draft, and took no time."""
        for stage in {leg.last, leg.last if leg.copy is None else leg.copy}:
            if stage >= 0:
                self.ending[stage].append(leg)
        if leg.copy is not None and leg.copy < 0:
            leg.sent = leg.copy
        if leg.last >= 0:
            return
        if leg.evict >= 0:
            leg.sent = leg.last
            self.staying.append(leg)
        elif leg.use >= 0 and not leg.is_gradient:
            leg.left = leg.updated = leg.evict
            if leg.fetch < 0:
                leg.came = leg.fetch
                self.here.append(leg)
            else:
                self._may_come(leg)

    def stage(self, n: int) -> None:
        """Play stage `n`."""
        while self.coming and self.coming[0][1].use <= n:
            self._come(self.coming[0][1], n)
        for leg in sorted((leg for leg in self.lazy if leg.evict <= n), key=lambda leg: leg.order):
            self._send(leg, n)
        for entry in [entry for entry in self.gradients if entry[0][0] == n + 1]:
            self._update(entry, n)
        start_s = self.clock.now
        end_s = self._run(n, replace(self.clock, activations=dict(self.clock.activations)))
        self._come_early(n, end_s + self.manner.ahead * (end_s - start_s))
        self._update_early(n, end_s)
        self._send_lazily(n, end_s)
        self.clock.now = self._run(n, self.clock)
        self.here = [leg for leg in self.here if leg.use != n]
        self._end(n)

    def _run(self, n: int, clock: _Clock) -> float:
        """The stage's turns and updates on `clock`; when they end."""
        s, slices, machine = n % self.stages, self.plan.slices, self.machine
        stage = self.plan.stages[s]
        option = self.setting.chain.blocks[stage.block].option(self.plan.options[stage.block])
        needed = [leg for leg in self.here if leg.use == n]
        ready = max((leg.ready_s for leg in needed if leg.item in self.reads[s]), default=0.0)
        seconds = option.forward_s if stage.direction is not Direction.BACKWARD else 0.0
        seconds += option.backward_s if stage.direction is not Direction.FORWARD else 0.0
        for k in range(slices):
            for item, size in self.back_at.get(s * slices + k, ()):
                clock.h2d = max(clock.h2d, clock.now, clock.activations[item]) + size / machine.h2d_bytes_per_s
                clock.activations[item] = clock.h2d
            own = f"a:{stage.block}.{k}"
            if stage.direction is Direction.BACKWARD:
                ready = max(ready, clock.activations.pop(own, 0.0))
            clock.now = max(clock.now, ready) + max(seconds, machine.launch_s)
            if stage.direction is Direction.FORWARD and option.offloaded_bytes:
                clock.d2h = max(clock.d2h, clock.now) + option.offloaded_bytes / machine.d2h_bytes_per_s
                clock.activations[own] = clock.d2h
            for item, _ in self.free_at.get(s * slices + k, ()):
                clock.now = max(clock.now, clock.activations[item])
        ready = max((leg.ready_s for leg in needed), default=0.0)
        return max(clock.now, ready) + self.gpu_update_s[s]

    def _may_come(self, leg: Leg) -> None:
        insort(self.coming, (leg.order, leg), key=lambda entry: entry[0])

    def _come(self, leg: Leg, n: int) -> None:
        """Its copy to the device is put on the link in stage `n`."""
        self.coming.remove((leg.order, leg))
        self.clock.h2d = max(self.clock.h2d, self.clock.now, leg.ready_s) + leg.size / self.machine.h2d_bytes_per_s
        leg.came, leg.ready_s = n, self.clock.h2d
        self._take(leg.size, n, leg.fetch)
        self._take(-leg.size, leg.fetch, n)
        self.here.append(leg)

    def _take(self, size: int, first: int, last: int) -> None:
        """`size` bytes of the room of the stages from `first` to before `last`."""
        for n in range(first, last):
            self.room[n] -= size

    def _come_early(self, n: int, end_s: float) -> None:
        for _, leg in list(self.coming):
            start_s = max(self.clock.h2d, self.clock.now)
            if start_s >= end_s - self.back_s[n % self.stages]:
                return
            if leg.ready_s > start_s or leg.updated == n:
                continue
            if leg.fetch <= n or (self.room[n] >= leg.size and min(self.room[n : leg.fetch]) >= leg.size):
                self._come(leg, n)
            elif not self.manner.overtake:
                return

    def _update(self, entry: tuple[tuple[int, int], Leg, Leg], n: int) -> None:
        """The CPU gets the update of a weight whose gradient is sent."""
        self.gradients.remove(entry)
        _, gradient, weight = entry
        self.clock.cpu = max(self.clock.cpu, self.clock.now, gradient.sent_s) + weight.update_s
        weight.updated, weight.ready_s = n, self.clock.cpu
        self._may_come(weight)

    def _update_early(self, n: int, end_s: float) -> None:
        while self.gradients and not self.setting.clip:
            now = max(self.clock.cpu, self.clock.now)
            entry = next((entry for entry in self.gradients if entry[1].sent_s <= now), None)
            entry = entry or min(self.gradients, key=lambda entry: entry[1].sent_s)
            if max(now, entry[1].sent_s) >= end_s:
                return
            self._update(entry, n)

    def _send(self, leg: Leg, n: int) -> None:
        if leg in self.lazy:
            self.lazy.remove(leg)
        self.clock.d2h = max(self.clock.d2h, self.clock.now) + leg.size / self.machine.d2h_bytes_per_s
        leg.sent, leg.sent_s = n, self.clock.d2h

    def _send_lazily(self, n: int, end_s: float) -> None:
        for leg in sorted(self.lazy, key=lambda leg: leg.order):
            if max(self.clock.d2h, self.clock.now) >= end_s:
                return
            self._send(leg, n)

    def _end(self, n: int) -> None:
        """The end of stage `n`: copies of what it made, and releases."""
        ending = sorted(self.ending[n], key=lambda leg: (not leg.is_gradient, leg.order))
        for leg in ending:
            if leg.copy == n and leg.last > n:
                self.lazy.append(leg)
            elif leg.copy == n:
                self._send(leg, n)
        for leg in ending:
            if leg.last == n and leg.copy is None:
                self._leave(leg, n)
            elif leg.last == n:
                self.staying.append(leg)
        for leg in ending:
            if leg.is_gradient:
                insort(self.gradients, (leg.order, leg, self.stale.pop(leg.item[2:])), key=lambda entry: entry[0])
        all_wait = self.setting.clip and (n + 1) % self.stages == 0
        for entry in [entry for entry in self.gradients if all_wait or entry[0][0] == n + 1]:  # block 0's: no gap
            self._update(entry, n)
        self._release(n)

    def _release(self, n: int) -> None:
        """What has been copied leaves; what has not stays where there is room, else the device waits."""
        waiting = sorted((leg for leg in self.staying if leg.sent is not None), key=lambda leg: leg.sent_s)
        stay = sum(leg.size for leg in waiting if leg.evict <= n)
        for leg in waiting:
            due = leg.evict <= n
            last = (n + 1) % self.stages == 0 if leg.is_gradient else n + 1 >= leg.fetch
            if leg.sent_s <= self.clock.now or (due and (last or stay > self.room[n + 1])):
                self.clock.now = max(self.clock.now, leg.sent_s)
                stay -= leg.size if due else 0
                self.staying.remove(leg)
                self._leave(leg, n)
        self.room[n + 1] -= stay

    def _leave(self, leg: Leg, n: int) -> None:
        leg.left = n
        self._take(-leg.size, n + 1, leg.evict + 1)
        if leg.update_s:
            self.stale[leg.item[2:]] = leg
        elif not leg.is_gradient:
            leg.ready_s = leg.sent_s
            self._may_come(leg)

    def draft(self) -> Draft:
        """The draft as it was played."""
        legs: dict[str, list[Leg]] = {}
        for leg in self.taken:
            legs.setdefault(leg.item[2:], []).append(leg)
        journeys = tuple(self._journey(journey, legs.get(journey.tensor.name, [])) for journey in self.source.journeys)
        return replace(self.source, journeys=journeys)

    def _journey(self, journey: Journey, legs: list[Leg]) -> Journey:
        trips: dict[str, list[Trip]] = {"w": [], "s": []}
        for leg in legs:
            assert leg.left is not None
            sent = None if leg.sent is None else leg.sent % self.stages
            if leg.is_gradient:
                journey = replace(journey, send=sent, drop=leg.left % self.stages)
                continue
            assert leg.came is not None
            if leg.update_s:
                assert leg.updated is not None
                journey = replace(journey, update=leg.updated % self.stages)
            if leg.came > leg.left + 1 or leg.copy is not None or leg.update_s:
                trip = Trip(evict=leg.left % self.stages, prefetch=leg.came % self.stages, offload=sent)
                trips[leg.item[0]].append(trip)
        return replace(journey, weight=tuple(trips["w"]), states=tuple(trips["s"]))
