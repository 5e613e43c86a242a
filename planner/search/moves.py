"""Moves transfers and updates of a candidate to other stages, and counts the free device memory that this takes, to the
byte.

An absence is a time during which a tensor is not on the device. It has up to four stages: those in which the tensor's
copy is sent to the host, the tensor leaves the device, the CPU updates it, and it comes back. In several rounds only
the absences of weights move, because only these are the same in each round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.candidate.absence_windows import Window, windows_of, with_absence
from planner.candidate.candidate import Absence, Candidate, TensorSchedule
from planner.candidate.evaluate import Evaluation
from planner.candidate.setting import Setting
from planner.candidate.stage_model import StageModel
from planner.schedule.items import GRADIENT, WEIGHT, Item


@dataclass(frozen=True, slots=True)
class Place:
    """The four stages (each one block's forward or backward) of an absence, a time when a tensor is off the device:
    copy sent to the host, device copy released, CPU update, return to the device. Stage numbers go on past the end of a
    step. `update` is used only for a weight that the CPU updates."""

    sent: int
    evict: int
    fetch: int
    update: int


class Board:
    """All absences of a candidate plan, the times when its tensors are off the device, each with the stages in which
    they begin and end. A stage is one block's forward or backward. Absences can be moved to other stages. `room`: free
    bytes on the device, for each stage."""

    def __init__(self, setting: Setting, seen: Evaluation) -> None:
        candidate = seen.candidate
        self.setting, self.candidate = setting, candidate
        self.model = StageModel(setting, candidate)
        self.stages, self.room = len(seen.plan.stages), list(seen.room_bytes)
        self.windows = windows_of(setting, candidate)
        self.schedules = list(candidate.schedules)
        self._changed: dict[int, None] = {}
        self.number = {schedule.tensor.name: n for n, schedule in enumerate(self.schedules)}
        self.places = [_placed(window, self._schedule(window), self.stages) for window in self.windows]
        by_item = {(window.item, window.is_gradient or window.update_s > 0): n for n, window in enumerate(self.windows)}
        #: gradient's absence -> the absence of its weight that waits for the update, and the other way round, by number
        self.partner = [
            by_item.get((Item.of(WEIGHT if window.is_gradient else GRADIENT, window.item.name), True))
            for window in self.windows
        ]
        self.of_item: dict[str, list[int]] = {}
        for n, window in enumerate(self.windows):
            if setting.rounds == 1 or window.item.kind == WEIGHT:  # others differ between rounds
                self.of_item.setdefault(window.item, []).append(n)

    def _schedule(self, window: Window) -> TensorSchedule:
        return self.schedules[self.number[window.item.name]]

    def critical(self) -> list[tuple[int, Place]]:
        """Return the absences (times when a tensor is off the device) that make the step longer, as (number, better
        place) pairs. A fetch for which the device waited comes a stage earlier, a release that waited for its copy
        comes a stage later. Places that are not allowed are left out."""
        found = []
        for what, item in self.model.critical():
            for n in self.of_item.get(item, ()):
                old = self.places[n]
                place = replace(old, fetch=old.fetch - 1) if what == "fetch" else replace(old, evict=old.evict + 1)
                if self._allows(n, place):
                    found.append((n, place))
        return found

    def _allows(self, n: int, place: Place) -> bool:
        """Return whether absence number `n` may have this place. Whether the device has memory for it is not
        checked."""
        window, partner = self.windows[n], self.partner[n]
        if window.is_gradient:
            if partner is None or place.fetch != self.places[n].fetch:
                return False  # between rounds, for an update on the device; and a gradient's return is fixed
            return window.last <= place.sent <= place.evict < self.stages and place.sent <= self.places[partner].update
        if not window.last <= place.evict < place.fetch <= window.use:
            return False
        if window.copy is None:
            if place.evict != self.places[n].evict:
                return False
        elif not window.copy <= place.sent <= place.evict:
            return False
        if not window.update_s:
            return True
        if self.setting.clip and place.update != self.places[n].update:
            return False  # whether it waits for the gradient norm is decided already
        assert partner is not None
        # The old weight leaves the device before the host has the new one; block 0's leaves in the same stage.
        gone = place.evict + ((window.last + 1) % self.stages != 0)
        return max(gone, self.places[partner].sent) <= place.update < place.fetch

    def put(self, changed: Sequence[tuple[int, Place]]) -> None:
        """Move absences (times when a tensor is off the device) to other stages; `changed` has (absence number, new
        place) pairs. The free bytes per stage are updated."""
        for n, place in changed:
            size, old = self.windows[n].size, self.places[n]
            self.places[n] = place
            self._take(size, old.evict + 1, place.evict + 1)
            self._take(size, place.fetch, old.fetch)
            number = self.number[self.windows[n].item.name]
            self.schedules[number] = self._moved(self.schedules[number], self.windows[n], place)
            self._changed[number] = None

    def put_if_room(self, n: int, place: Place) -> None:
        """Move absence number `n`, a time when a tensor is off the device, to `place`, unless that place is not allowed
        or the device has too little memory for it."""
        if not self._allows(n, place):
            return
        old = self.places[n]
        self.put([(n, place)])
        if min(self.room) < 0:
            self.put([(n, old)])

    def step_s(self) -> float:
        """Return the predicted seconds of a step with the absences (times when tensors are off the device) as they are
        now."""
        self.model.change((number, self.schedules[number]) for number in self._changed)
        self._changed.clear()
        return self.model.step_s()

    def _take(self, size: int, first: int, last: int) -> None:
        """Subtract `size` bytes from the free bytes of stages `first` to `last` - 1. Where `last` < `first`, add them
        to those of stages `last` to `first` - 1."""
        if last < first:
            size, first, last = -size, last, first
        for stage in range(first, last):
            self.room[stage % self.stages] -= size

    def _moved(self, schedule: TensorSchedule, window: Window, place: Place) -> TensorSchedule:
        T = self.stages
        if window.is_gradient:
            return replace(schedule, send=place.sent, drop=place.evict)
        sent = None if window.copy is None else place.sent % T
        schedule = with_absence(
            schedule, window, Absence(evict=place.evict % T, prefetch=place.fetch % T, offload=sent)
        )
        return replace(schedule, update=place.update % T) if window.update_s else schedule

    def proposed(self) -> Candidate:
        """Return the candidate plan with the absences (times when tensors are off the device) as they are now."""
        return replace(self.candidate, schedules=tuple(self.schedules))


def _placed(window: Window, schedule: TensorSchedule, stages: int) -> Place:
    """Return the place of an absence in its tensor's schedule."""
    if window.is_gradient:
        assert schedule.send is not None
        return Place(schedule.send, window.evict, window.use, window.use)
    absence = (schedule.weight if window.item.kind == WEIGHT else schedule.states)[window.absence]
    sent = window.evict if absence.offload is None else window.evict - (window.evict - absence.offload) % stages
    if not window.update_s:
        return Place(sent, window.evict, window.fetch, window.evict)
    assert schedule.update is not None
    return Place(sent, window.evict, window.fetch, window.fetch - 1 - (window.fetch - 1 - schedule.update) % stages)
