"""The absences of a draft's items, one by one: what a journey leaves to decide once it is known what moves at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.draft.draft import Draft, Journey, Side, Trip, backward_stage
from planner.draft.setting import Setting


@dataclass(slots=True, kw_only=True, eq=False)
class Leg:
    """One absence of one item. Stages count on past a step's end.

    `last`: the stage that touches it before; `use`: that needs it back, of a gradient: its weight. `evict`, `fetch`: by
    the draft. `copy`: the stage that makes what the host must get, None where the host's copy is right. `update_s`: the
    CPU's work before it may come back. What follows is for `planner.search.list_schedule`, which decides it.
    """

    key: int  # order of items that are needed in one stage: weights before states
    item: str
    trip: int
    size: int
    last: int
    use: int
    evict: int
    fetch: int
    copy: int | None = None
    update_s: float = 0.0
    sent: int | None = None
    left: int | None = None
    updated: int | None = None
    came: int | None = None
    sent_s: float = 0.0  # when it is on the host
    ready_s: float = 0.0  # when the host's copy is right; once it came: when it is there

    @property
    def order(self) -> tuple[int, int]:
        """What is needed first comes first."""
        return self.use, self.key

    @property
    def is_gradient(self) -> bool:
        """It only leaves."""
        return self.item[0] == "g"

    def after(self, stages: int) -> Leg:
        """The same so many stages later, nothing decided."""
        return Leg(
            key=self.key, item=self.item, trip=self.trip, size=self.size, last=self.last + stages,
            use=self.use + stages, evict=self.evict + stages, fetch=self.fetch + stages,
            copy=None if self.copy is None else self.copy + stages, update_s=self.update_s,
        )  # fmt: skip


def legs_of(setting: Setting, draft: Draft) -> list[Leg]:
    """All absences of one step, journey by journey."""
    users, stages = setting.chain.users(), 2 * len(setting.chain.blocks) - 1
    found: list[Leg] = []
    for number, journey in enumerate(draft.journeys):
        blocks = users[journey.tensor.name]
        touched = [*blocks, *(backward_stage(setting.chain, block) for block in blocks)]
        updates = [journey.update] if journey.side is Side.GPU and journey.update is not None else []
        found += _absences(setting, journey, "w", number, [*touched, *updates], stages)
        found += _absences(setting, journey, "s", number + len(draft.journeys), updates, stages)
        if journey.drop is not None:
            made = max(touched)
            gradient = Leg(
                key=number, item=f"g:{journey.tensor.name}", trip=0, size=journey.tensor.gradient_bytes, last=made,
                use=min(blocks) + stages, evict=journey.drop, fetch=stages, copy=made,
            )  # fmt: skip
            found.append(gradient)
    return found


def _absences(
    setting: Setting, journey: Journey, kind: str, key: int, touched: list[int], stages: int
) -> Iterator[Leg]:  # fmt: skip
    tensor = journey.tensor
    update_s = tensor.elements / setting.hardware.cpu_update_parameters_per_s
    for number, trip in enumerate(journey.weight if kind == "w" else journey.states):
        last = trip.evict - min((trip.evict - s) % stages for s in touched)
        fetch = trip.evict + ((trip.prefetch - trip.evict) % stages or stages)
        copy = None
        if trip.offload is not None:
            assert journey.update is not None
            copy = last - (last - journey.update) % stages
        on_cpu = journey.side is Side.CPU and last % stages == max(touched)
        yield Leg(
            key=key, item=f"{kind}:{tensor.name}", trip=number,
            size=tensor.bytes if kind == "w" else tensor.state_bytes, last=last,
            use=fetch + min((s - trip.prefetch) % stages for s in touched), evict=trip.evict, fetch=fetch, copy=copy,
            update_s=update_s if on_cpu else 0.0,
        )  # fmt: skip


def with_lead(setting: Setting, draft: Draft, lead: int) -> Draft:
    """The draft with everything fetched `lead` stages before its use and, where it is copied, released as many after;
    with 0, in the very stage: slow, and never more on the device than in any other order.
    """
    stages = 2 * len(setting.chain.blocks) - 1
    legs: dict[str, list[Leg]] = {}
    for leg in legs_of(setting, draft):
        legs.setdefault(leg.item[2:], []).append(leg)
    journeys = []
    for journey in draft.journeys:
        for leg in legs.get(journey.tensor.name, ()):
            if leg.is_gradient:
                update = stages - 1 if setting.clip else min(leg.last + 1, stages - 1)
                drop = min(leg.last + lead, stages - 1)
                journey = replace(journey, send=leg.last, drop=drop, update=update)
            else:
                journey = _led(journey, leg, lead, stages)
        journeys.append(journey)
    return replace(draft, journeys=tuple(journeys))


def _led(journey: Journey, leg: Leg, lead: int, stages: int) -> Journey:
    away = leg.use - leg.last
    least = 2 if leg.update_s else 1  # the update is listed in between
    late = min(lead, max(0, away - least)) if leg.copy is not None else 0
    early = min(lead, max(0, away - least - late))
    offload = None if leg.copy is None else leg.last % stages
    trip = Trip(evict=(leg.last + late) % stages, prefetch=(leg.use - early) % stages, offload=offload)
    return with_trip(journey, leg, trip)


def with_trip(journey: Journey, leg: Leg, trip: Trip) -> Journey:
    """The journey with another trip in the leg's place."""
    trips = journey.weight if leg.item[0] == "w" else journey.states
    trips = (*trips[: leg.trip], trip, *trips[leg.trip + 1 :])
    return replace(journey, weight=trips) if leg.item[0] == "w" else replace(journey, states=trips)
