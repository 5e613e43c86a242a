"""A draft as a board of stages: what happens to each of its legs in which stage, and how long a step then lasts.

Where only stages change, no program need be made to look at a draft. The board has each stage's operations in the
order of `planner.draft.draft.assemble` and `planner.schedule.serial_order`, the clock of `planner.schedule.simulate`,
and the room that the draft leaves on the device, stage by stage, to the byte: a tenth of the time. For steps of one
round that wait for no norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.draft.absences import Leg, legs_of, with_trip
from planner.draft.draft import Draft, Journey, Trip
from planner.draft.setting import Setting
from planner.schedule.compile import reads
from planner.schedule.plan import Direction, Plan, Stage
from planner.schedule.serial_order import activation_turns

_STEPS = 4  # a step depends on the one before only; from the third on they look alike


@dataclass(frozen=True, slots=True)
class Place:
    """The stages of a leg, counted on past a step's end: its copy to the host is sent, it leaves the device, it comes
    back, and of a weight that the CPU updates: its update.
    """

    sent: int
    evict: int
    fetch: int
    update: int


class Board:
    """`legs`, and where they are: `places`. `room`: bytes left on the device per stage."""

    def __init__(self, setting: Setting, draft: Draft, plan: Plan, room_bytes: Sequence[int]) -> None:
        """`plan`: what the draft assembles to; `room_bytes`: what its stages leave free."""
        self.draft, self.stages = draft, len(plan.stages)
        self.legs, self.room = legs_of(setting, draft), list(room_bytes)
        journeys = {journey.tensor.name: journey for journey in draft.journeys}
        self.places = [_placed(leg, journeys[leg.item[2:]], self.stages) for leg in self.legs]
        number = {(leg.item, leg.is_gradient or leg.update_s > 0): n for n, leg in enumerate(self.legs)}
        #: number of a gradient's leg -> of its weight's that waits for the update, and the other way round
        self.partner = [number.get((f"{'w' if leg.is_gradient else 'g'}:{leg.item[2:]}", True)) for leg in self.legs]
        self.clock = _Clock(setting, plan, self.legs, self.partner)

    def allows(self, n: int, place: Place) -> bool:
        """Whether the leg may be there, for all that room says."""
        leg, partner = self.legs[n], self.partner[n]
        if leg.is_gradient:
            assert partner is not None
            return leg.last <= place.sent <= place.evict < self.stages and place.sent <= self.places[partner].update
        if not leg.last <= place.evict < place.fetch <= leg.use:
            return False
        if leg.copy is not None and not leg.copy <= place.sent <= place.evict:
            return False
        if not leg.update_s:
            return True
        assert partner is not None
        # The stale weight is gone before the host has a newer one; block 0's leaves in the very stage.
        gone = place.evict + ((leg.last + 1) % self.stages != 0)
        return max(gone, self.places[partner].sent) <= place.update < place.fetch

    def put(self, n: int, place: Place) -> None:
        """The leg is there from now on."""
        size, old = self.legs[n].size, self.places[n]
        self.places[n] = place
        self._take(size, old.evict + 1, place.evict + 1)
        self._take(size, place.fetch, old.fetch)

    def _take(self, size: int, first: int, last: int) -> None:
        """`size` bytes of the room of the stages from `first` to before `last`; given back where `last` is before."""
        if last < first:
            size, first, last = -size, last, first
        for n in range(first, last):
            self.room[n % self.stages] -= size

    def step_s(self) -> float:
        """Seconds of a step, as simulated."""
        return self.clock.step_s(self.places)

    def drafted(self) -> Draft:
        """The draft with the stages of this board."""
        T = self.stages
        journeys = {journey.tensor.name: journey for journey in self.draft.journeys}
        for leg, place in zip(self.legs, self.places, strict=True):
            journey = journeys[leg.item[2:]]
            if leg.is_gradient:
                journey = replace(journey, send=place.sent, drop=place.evict)
            else:
                sent = None if leg.copy is None else place.sent % T
                trip = Trip(evict=place.evict % T, prefetch=place.fetch % T, offload=sent)
                journey = with_trip(journey, leg, trip)
                journey = replace(journey, update=place.update % T) if leg.update_s else journey
            journeys[leg.item[2:]] = journey
        return replace(self.draft, journeys=tuple(journeys[j.tensor.name] for j in self.draft.journeys))


def _placed(leg: Leg, journey: Journey, stages: int) -> Place:
    """Where the leg's journey has it."""
    if leg.is_gradient:
        assert journey.send is not None
        return Place(journey.send, leg.evict, leg.use, leg.use)
    trip = (journey.weight if leg.item[0] == "w" else journey.states)[leg.trip]
    sent = leg.evict if trip.offload is None else leg.evict - (leg.evict - trip.offload) % stages
    if not leg.update_s:
        return Place(sent, leg.evict, leg.fetch, leg.evict)
    assert journey.update is not None
    return Place(sent, leg.evict, leg.fetch, leg.fetch - 1 - (leg.fetch - 1 - journey.update) % stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One slice's turn: seconds of computing, numbers of what it reads, of activations that come back before it (with
    seconds of their copies), that it makes and sends, and that are released after it.
    """

    seconds: float
    reads: tuple[int, ...]
    back: tuple[tuple[int, float], ...]
    made: int | None
    send_s: float
    freed: tuple[int, ...]


class _Clock:
    """Plays a board's step. What happens in a stage is kept by number of item."""

    def __init__(
        self, setting: Setting, plan: Plan, legs: Sequence[Leg], partner: Sequence[int | None]
    ) -> None:  # fmt: skip
        machine, chain = setting.hardware, setting.chain
        self.legs, self.stages = legs, len(plan.stages)
        self.number: dict[str, int] = {}
        self.item = [self._of(leg.item) for leg in legs]
        self.gradient = [self.item[n if other is None else other] for n, other in enumerate(partner)]
        self.h2d_s = [leg.size / machine.h2d_bytes_per_s for leg in legs]
        self.d2h_s = [leg.size / machine.d2h_bytes_per_s for leg in legs]
        self.first = [chain.users()[leg.item[2:]][0] for leg in legs]
        turns = [(n, stage, k) for n, stage in enumerate(plan.stages) for k in range(plan.slices)]
        back_at, free_at = activation_turns(plan, chain, turns)
        self.turns: list[list[_Turn]] = [[] for _ in plan.stages]
        for number, (n, stage, k) in enumerate(turns):
            self.turns[n].append(
                self._turn(setting, plan, stage, k, back_at.get(number, ()), free_at.get(number, ()))
            )  # fmt: skip
        self.made: list[list[int]] = [[] for _ in plan.stages]  # gradients
        for leg in legs:
            if leg.is_gradient:
                self.made[leg.last].append(self._of(leg.item))
        moving = {leg.item[2:] for leg in legs if leg.copy is not None and not leg.is_gradient}
        seconds = {
            t.name: t.elements / machine.gpu_update_parameters_per_s for t in (*chain.tensors(), *chain.frame_tensors)
        }
        self.home_s = [sum(seconds[name] for name in s.gpu_update if name not in moving) for s in plan.stages]
        self.home_s[-1] += sum(seconds[t.name] for t in chain.frame_tensors if t.trainable)
        self.updates = [
            [(self._of(f"w:{x}"), self._of(f"s:{x}"), seconds[x]) for x in stage.gpu_update if x in moving]
            for stage in plan.stages
        ]
        self._reset()

    def _of(self, item: str) -> int:
        """An item's number."""
        return self.number.setdefault(item, len(self.number))

    def _turn(
        self, setting: Setting, plan: Plan, stage: Stage, k: int, back: Sequence[tuple[str, int]],
        free: Sequence[tuple[str, int]],
    ) -> _Turn:  # fmt: skip
        machine, chain = setting.hardware, setting.chain
        option = chain.blocks[stage.block].option(plan.options[stage.block])
        seconds = option.forward_s if stage.direction is not Direction.BACKWARD else 0.0
        seconds += option.backward_s if stage.direction is not Direction.FORWARD else 0.0
        offloads = stage.direction is Direction.FORWARD and option.offloaded_bytes > 0
        needs = [f"w:{name}" for name in reads(chain, plan.options, stage.direction, stage.block)]
        needs += [f"a:{stage.block}.{k}"] if stage.direction is Direction.BACKWARD else []
        return _Turn(
            seconds=max(seconds, machine.launch_s),
            reads=tuple(self._of(item) for item in needs),
            back=tuple((self._of(item), size / machine.h2d_bytes_per_s) for item, size in back),
            made=self._of(f"a:{stage.block}.{k}") if offloads else None,
            send_s=option.offloaded_bytes / machine.d2h_bytes_per_s,
            freed=tuple(self._of(item) for item, _ in free),
        )

    def _reset(self) -> None:
        count = len(self.number)
        self.there = [0.0] * count  # when the device's copy is right
        self.host = [0.0] * count  # when the host's is
        self.read = [0.0] * count  # when the CPU has read that
        self.now = self.h2d = self.d2h = self.cpu = 0.0

    def step_s(self, places: Sequence[Place]) -> float:
        """Seconds of a step."""
        self._reset()
        lists = self._lists(places)
        before = 0.0
        for _ in range(_STEPS):
            before = self.now
            for turns, made, home_s, stage in zip(self.turns, self.made, self.home_s, lists, strict=True):
                self._fetch(stage.come)
                self._send(stage.leave)
                self._update(stage.cpu)
                for turn in turns:
                    self._run(turn)
                for i in made:
                    self.there[i] = self.now
                self.now += home_s
                self._update_here(stage.gpu)
                self._send(stage.made_leave)
                self._update(stage.made_cpu)
                self.now = max([self.now, *(self.host[i] for i in stage.gone)])
        return self.now - before

    def _fetch(self, legs: Sequence[int]) -> None:
        now, h2d = self.now, self.h2d
        for n in legs:
            i = self.item[n]
            h2d = max(h2d, now, self.host[i]) + self.h2d_s[n]
            self.there[i] = h2d
        self.h2d = h2d

    def _send(self, legs: Sequence[int]) -> None:
        d2h = self.d2h
        for n in legs:
            i = self.item[n]
            d2h = max(d2h, self.there[i], self.read[i]) + self.d2h_s[n]
            self.host[i] = d2h
        self.d2h = d2h

    def _update(self, legs: Sequence[int]) -> None:
        """By the CPU."""
        for n in legs:
            g = self.gradient[n]
            self.cpu = max(self.cpu, self.host[g]) + self.legs[n].update_s
            self.host[self.item[n]] = self.read[g] = self.cpu

    def _update_here(self, updates: Sequence[tuple[int, int, float]]) -> None:
        """On the device, of tensors that travel, one by one."""
        now, there, host = self.now, self.there, self.host
        for w, s, seconds in updates:
            now = max(now, there[w], there[s], host[w], host[s]) + seconds
            there[w] = there[s] = now
        self.now = now

    def _run(self, turn: _Turn) -> None:
        now, there = self.now, self.there
        for i, seconds in turn.back:
            self.h2d = there[i] = max(self.h2d, now, self.host[i]) + seconds
        for i in turn.reads:
            if there[i] > now:
                now = there[i]
        now += turn.seconds
        if turn.made is not None:
            self.d2h = self.host[turn.made] = max(self.d2h, now) + turn.send_s
        self.now = max([now, *(self.host[i] for i in turn.freed)])

    def _lists(self, places: Sequence[Place]) -> list[_Lists]:
        """What each stage does, in order."""
        T = self.stages
        come: list[list[tuple[int, int]]] = [[] for _ in range(T)]
        leave: list[list[tuple[int, int]]] = [[] for _ in range(T)]
        cpu: list[list[tuple[int, int]]] = [[] for _ in range(T)]
        lists = [_Lists() for _ in range(T)]
        for n, (leg, place) in enumerate(zip(self.legs, places, strict=True)):
            if leg.copy is not None:
                due = 0 if leg.is_gradient else (place.fetch - place.sent) % T + leg.use - place.fetch
                leave[place.sent % T].append((due, n))
                lists[place.evict % T].gone.append(self.item[n])
            if leg.update_s:
                cpu[place.update % T].append((self.first[n], n))
            if not leg.is_gradient:
                come[place.fetch % T].append((2 * (leg.use - place.fetch) + (leg.item[0] == "s"), n))
        arrival: dict[int, tuple[int, int]] = {}  # item -> stage and place in it
        for s, stage in enumerate(lists):
            stage.come = [n for _, n in sorted(come[s])]
            arrival |= {self.item[n]: (s, k) for k, n in enumerate(stage.come)}
            for _, n in sorted(leave[s]):
                made = (self.legs[n].copy or 0) % T == s
                (stage.made_leave if made else stage.leave).append(n)
            for _, n in sorted(cpu[s]):
                (stage.made_cpu if self.legs[n].last % T == s else stage.cpu).append(n)
        for s, stage in enumerate(lists):

            def waits(update: tuple[int, int, float], s: int = s) -> tuple[int, int]:
                fetched, k = arrival.get(update[1], (s + 1, 0))
                return -((s - fetched) % T), k

            stage.gpu = sorted(self.updates[s], key=waits)
        return lists


@dataclass(slots=True)
class _Lists:
    """What one stage does: legs that come, legs that leave and CPU updates, those of what the stage makes apart; items
    of the device's updates; items gone at its end."""

    come: list[int] = field(default_factory=list)
    leave: list[int] = field(default_factory=list)
    made_leave: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)
    made_cpu: list[int] = field(default_factory=list)
    gpu: list[tuple[int, int, float]] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
