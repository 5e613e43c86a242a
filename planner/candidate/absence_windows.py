"""Lists the windows of a candidate: for each time that a weight, gradient or states leave the device, the stages
between which this absence may lie. Once it is known which items move, only these stages are left to decide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.candidate.candidate import Absence, Candidate, Side, TensorSchedule, backward_stage
from planner.candidate.setting import Setting
from planner.schedule.items import GRADIENT, STATES, WEIGHT, Item
from planner.schedule.update_work import cpu_work


@dataclass(slots=True, kw_only=True, eq=False)
class Window:
    """One absence of one item (weight, gradient or optimizer states) from the device, and the stages between which it
    may lie. Stage numbers count on past a step's end.

    `last`: the last stage that uses the item before the absence. `use`: the stage that needs it back (for a gradient:
    that needs its weight). `evict`, `fetch`: the stages at which the candidate releases and fetches it. `copy`: the
    stage that computes what the host must get; None if the host's copy is current. `size`: bytes. `absence`: its index
    in the tensor's schedule. `update_s`: seconds of CPU work before the item may come back; `drive_s`: those of the
    drive, if the states are on disk. `sent` and the fields after it are set by `planner.search.list_schedule`.
    """

    key: int  # orders items that are needed in the same stage: weights before states
    item: Item
    absence: int
    size: int
    last: int
    use: int
    evict: int
    fetch: int
    copy: int | None = None
    update_s: float = 0.0
    drive_s: float = 0.0
    sent: int | None = None
    left: int | None = None
    updated: int | None = None
    came: int | None = None
    sent_s: float = 0.0  # when the item is on the host
    ready_s: float = 0.0  # when the host's copy is current; after the fetch: when the device's copy is there

    @property
    def order(self) -> tuple[int, int]:
        """The sort key (stage of need, `key`) by which windows whose items are needed first come first."""
        return self.use, self.key

    @property
    def is_gradient(self) -> bool:
        """Whether the item is a gradient; a gradient leaves the device and does not come back."""
        return self.item.kind == GRADIENT

    def after(self, stages: int) -> Window:
        """The same window `stages` stages later, with nothing decided."""
        return Window(
            key=self.key,
            item=self.item,
            absence=self.absence,
            size=self.size,
            last=self.last + stages,
            use=self.use + stages,
            evict=self.evict + stages,
            fetch=self.fetch + stages,
            copy=None if self.copy is None else self.copy + stages,
            update_s=self.update_s,
            drive_s=self.drive_s,
        )


def windows_of(setting: Setting, candidate: Candidate) -> list[Window]:
    """All absences of items from the device in one step, schedule by schedule."""
    users, stages = setting.chain.users(), 2 * len(setting.chain.blocks) - 1
    windows: list[Window] = []
    for number, schedule in enumerate(candidate.schedules):
        blocks = users[schedule.tensor.name]
        touched = [*blocks, *(backward_stage(setting.chain, block) for block in blocks)]
        updates = [schedule.update] if schedule.side is Side.GPU and schedule.update is not None else []
        windows += _absences(setting, schedule, WEIGHT, number, [*touched, *updates], stages)
        windows += _absences(setting, schedule, STATES, number + len(candidate.schedules), updates, stages)
        if schedule.drop is not None:
            last_stage = max(touched)
            gradient = Window(
                key=number,
                item=Item.gradient(schedule.tensor.name),
                absence=0,
                size=schedule.tensor.gradient_bytes,
                last=last_stage,
                use=min(blocks) + stages,
                evict=schedule.drop,
                fetch=stages,
                copy=last_stage,
            )
            windows.append(gradient)
    return windows


def _absences(
    setting: Setting, schedule: TensorSchedule, kind: str, key: int, touched: list[int], stages: int
) -> Iterator[Window]:
    tensor = schedule.tensor
    work = cpu_work(tensor, setting.chain, setting.hardware)
    update_s = work / setting.chain.update_rates(setting.hardware).cpu
    moved_bytes = tensor.state_bytes + tensor.gradient_bytes * tensor.wholly_on_disk
    drive_s = moved_bytes * setting.hardware.disk_s_per_byte if tensor.states_on_disk else 0.0
    if schedule.trails:
        drive_s = tensor.state_bytes / setting.hardware.disk_read_bytes_per_s
    for number, absence in enumerate(schedule.weight if kind == WEIGHT else schedule.states):
        last = absence.evict - min((absence.evict - s) % stages for s in touched)
        fetch = absence.evict + ((absence.prefetch - absence.evict) % stages or stages)
        copy = None
        if absence.offload is not None:
            assert schedule.update is not None
            copy = last - (last - schedule.update) % stages
        on_cpu = schedule.side is Side.CPU and last % stages == max(touched)
        yield Window(
            key=key,
            item=Item.of(kind, tensor.name),
            absence=number,
            size=tensor.bytes if kind == WEIGHT else tensor.state_bytes,
            last=last,
            use=fetch + min((s - absence.prefetch) % stages for s in touched),
            evict=absence.evict,
            fetch=fetch,
            copy=copy,
            update_s=update_s if on_cpu else 0.0,
            drive_s=drive_s if on_cpu else 0.0,
        )


def with_lead(setting: Setting, candidate: Candidate, lead: int) -> Candidate:
    """The candidate with every item fetched `lead` stages before its use and, if it must be copied to the host,
    released `lead` stages after its last use. With 0, copies and uses share a stage: that is slow, but no other order
    has less on the device."""
    stages = 2 * len(setting.chain.blocks) - 1
    windows: dict[str, list[Window]] = {}
    for window in windows_of(setting, candidate):
        windows.setdefault(window.item.name, []).append(window)
    schedules = []
    for schedule in candidate.schedules:
        for window in windows.get(schedule.tensor.name, ()):
            if window.is_gradient:
                update = stages - 1 if setting.clip else min(window.last + 1, stages - 1)
                drop = min(window.last + lead, stages - 1)
                schedule = replace(schedule, send=window.last, drop=drop, update=update)
            else:
                schedule = _led(schedule, window, lead, stages)
        schedules.append(schedule)
    return replace(candidate, schedules=tuple(schedules))


def _led(schedule: TensorSchedule, window: Window, lead: int, stages: int) -> TensorSchedule:
    away = window.use - window.last
    least = 2 if window.update_s else 1  # the update is listed in between
    late = min(lead, max(0, away - least)) if window.copy is not None else 0
    early = min(lead, max(0, away - least - late))
    offload = None if window.copy is None else window.last % stages
    absence = Absence(evict=(window.last + late) % stages, prefetch=(window.use - early) % stages, offload=offload)
    return with_absence(schedule, window, absence)


def with_absence(schedule: TensorSchedule, window: Window, absence: Absence) -> TensorSchedule:
    """The schedule with `absence` in place of the absence that `window` describes."""
    absences = schedule.weight if window.item.kind == WEIGHT else schedule.states
    absences = (*absences[: window.absence], absence, *absences[window.absence + 1 :])
    return replace(schedule, weight=absences) if window.item.kind == WEIGHT else replace(schedule, states=absences)
