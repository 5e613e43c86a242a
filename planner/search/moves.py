"""Where a draft's absences may be instead, and the room on the device that they need, to the byte.

An absence has up to four stages: its copy to the host is sent, it leaves the device, it comes back, and the CPU's
update in between. In several rounds only weights move, which come and go in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.draft.absences import Leg, legs_of, with_trip
from planner.draft.draft import Draft, Journey, Trip
from planner.draft.evaluate import Evaluation
from planner.draft.setting import Setting
from planner.draft.stage_model import StageModel


@dataclass(frozen=True, slots=True)
class Place:
    """The stages of an absence, counted on past a step's end. `update`: of a weight that the CPU updates."""

    sent: int
    evict: int
    fetch: int
    update: int


class Board:
    """The absences of a draft, and where they are. `room`: bytes left on the device per stage."""

    def __init__(self, setting: Setting, seen: Evaluation) -> None:
        draft = seen.draft
        self.setting, self.draft = setting, draft
        self.model = StageModel(setting, draft)
        self.stages, self.room = len(seen.plan.stages), list(seen.room_bytes)
        self.legs = legs_of(setting, draft)
        self.journeys = list(draft.journeys)
        self._changed: dict[int, None] = {}
        self.number = {journey.tensor.name: n for n, journey in enumerate(self.journeys)}
        self.places = [_placed(leg, self._journey(leg), self.stages) for leg in self.legs]
        by_item = {(leg.item, leg.is_gradient or leg.update_s > 0): n for n, leg in enumerate(self.legs)}
        #: number of a gradient's absence -> of its weight's that waits for the update, and the other way round
        self.partner = [by_item.get((f"{'w' if leg.is_gradient else 'g'}:{leg.item[2:]}", True)) for leg in self.legs]
        self.of_item: dict[str, list[int]] = {}
        for n, leg in enumerate(self.legs):
            if setting.rounds == 1 or leg.item[0] == "w":  # others are not alike in all rounds
                self.of_item.setdefault(leg.item, []).append(n)

    def _journey(self, leg: Leg) -> Journey:
        return self.journeys[self.number[leg.item[2:]]]

    def critical(self) -> list[tuple[int, Place]]:
        """Where what the step hangs on would have to be instead, as far as it may: a fetch that waited for the device a
        stage sooner, a release that waited for its copy a stage later."""
        found = []
        for what, item in self.model.critical():
            for n in self.of_item.get(item, ()):
                old = self.places[n]
                place = replace(old, fetch=old.fetch - 1) if what == "fetch" else replace(old, evict=old.evict + 1)
                if self._allows(n, place):
                    found.append((n, place))
        return found

    def _allows(self, n: int, place: Place) -> bool:
        """Whether the absence may be there, for all that room says."""
        leg, partner = self.legs[n], self.partner[n]
        if leg.is_gradient:
            if partner is None or place.fetch != self.places[n].fetch:
                return False  # the device's own, between rounds; and a gradient only leaves
            return leg.last <= place.sent <= place.evict < self.stages and place.sent <= self.places[partner].update
        if not leg.last <= place.evict < place.fetch <= leg.use:
            return False
        if leg.copy is None:
            if place.evict != self.places[n].evict:
                return False
        elif not leg.copy <= place.sent <= place.evict:
            return False
        if not leg.update_s:
            return True
        if self.setting.clip and place.update != self.places[n].update:
            return False  # it waits for the norm, or runs ahead of it
        assert partner is not None
        # The stale weight is gone before the host has a newer one; block 0's leaves in the very stage.
        gone = place.evict + ((leg.last + 1) % self.stages != 0)
        return max(gone, self.places[partner].sent) <= place.update < place.fetch

    def put(self, changed: Sequence[tuple[int, Place]]) -> None:
        """The absences are there from now on."""
        for n, place in changed:
            size, old = self.legs[n].size, self.places[n]
            self.places[n] = place
            self._take(size, old.evict + 1, place.evict + 1)
            self._take(size, place.fetch, old.fetch)
            number = self.number[self.legs[n].item[2:]]
            self.journeys[number] = self._moved(self.journeys[number], self.legs[n], place)
            self._changed[number] = None

    def put_if_room(self, n: int, place: Place) -> None:
        """The same, unless the budget has no room for it, or it may no more be there."""
        if not self._allows(n, place):
            return
        old = self.places[n]
        self.put([(n, place)])
        if min(self.room) < 0:
            self.put([(n, old)])

    def step_s(self) -> float:
        """Seconds of a step."""
        self.model.change((number, self.journeys[number]) for number in self._changed)
        self._changed.clear()
        return self.model.step_s()

    def _take(self, size: int, first: int, last: int) -> None:
        """`size` bytes of the room of the stages from `first` to before `last`; given back where `last` is before."""
        if last < first:
            size, first, last = -size, last, first
        for stage in range(first, last):
            self.room[stage % self.stages] -= size

    def _moved(self, journey: Journey, leg: Leg, place: Place) -> Journey:
        T = self.stages
        if leg.is_gradient:
            return replace(journey, send=place.sent, drop=place.evict)
        sent = None if leg.copy is None else place.sent % T
        journey = with_trip(journey, leg, Trip(evict=place.evict % T, prefetch=place.fetch % T, offload=sent))
        return replace(journey, update=place.update % T) if leg.update_s else journey

    def drafted(self) -> Draft:
        """The draft with the absences where they are."""
        return replace(self.draft, journeys=tuple(self.journeys))


def _placed(leg: Leg, journey: Journey, stages: int) -> Place:
    """Where the absence's journey has it."""
    if leg.is_gradient:
        assert journey.send is not None
        return Place(journey.send, leg.evict, leg.use, leg.use)
    trip = (journey.weight if leg.item[0] == "w" else journey.states)[leg.trip]
    sent = leg.evict if trip.offload is None else leg.evict - (leg.evict - trip.offload) % stages
    if not leg.update_s:
        return Place(sent, leg.evict, leg.fetch, leg.evict)
    assert journey.update is not None
    return Place(sent, leg.evict, leg.fetch, leg.fetch - 1 - (leg.fetch - 1 - journey.update) % stages)
