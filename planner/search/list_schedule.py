"""Decides when whole tensors move, by simulating a candidate's step with all queues as busy as memory allows.

The integer program is exact about sums over stages, but does not see the order of events within a stage. Here the step
is simulated in time, stage by stage, by the rules of `planner.schedule.serial_order` and `planner.schedule.simulate`.
Each decision is made at the time when it is due:

    host -> device  what is needed next comes next, as soon as the link has time for it and the budget has room
    device -> host  gradients and what must leave go at once, other copies when the link has nothing else to do
    CPU             of the gradients that have come, it takes that of the weight needed next; where the drive has not
                    read the states for it yet, one that need not wait for the drive
    release         when the copy is done; before that the device waits for the copy only where the next stage has no
                    room

The candidate decides which tensors move at all. The memory of its peaks is reserved for it: what comes earlier or
leaves later than in the candidate uses the rest of the budget. Three steps are simulated, and the second is the result.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from planner.candidate.absence_windows import Window, windows_of
from planner.candidate.candidate import Absence, Candidate, TensorSchedule
from planner.candidate.setting import Setting
from planner.schedule.activation_turns import StoredActivations, activation_turns
from planner.schedule.compile import reads
from planner.schedule.issuing import issue_s
from planner.schedule.items import Item
from planner.schedule.memory_use import state_ring_bytes
from planner.schedule.operations import ACTIVATION_SLOTS
from planner.schedule.plan import Direction, Plan
from planner.schedule.update_work import update_work

_STEPS = 3
_AHEAD = 0.5  # the share of the buffers for states on disk that is read ahead
_order = itemgetter(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """The rules by which the link from host to device chooses its next transfer, in the simulation of a step.

    `ahead`: how far past the end of the running stage (a block's forward or backward) transfers are started, in lengths
    of that stage: the device may have to wait there. `overtake`: where the tensor needed next has no room on the
    device, a smaller one that is needed later may come first.
    """

    ahead: float = 0.0
    overtake: bool = False


@dataclass(slots=True)
class _Clock:
    """The time in seconds at which the device and each queue are done with the work that they have got."""

    now: float = 0.0
    h2d: float = 0.0
    d2h: float = 0.0
    cpu: float = 0.0
    drive: float = 0.0
    writer: float = 0.0  # writes activations to disk; `reader` reads them back
    reader: float = 0.0
    activations: dict[str, float] = field(default_factory=dict)  # item -> when its last copy is done
    written: dict[str, float] = field(default_factory=dict)  # item on disk -> when it has been written
    slots: list[float] = field(default_factory=lambda: [0.0] * ACTIVATION_SLOTS)  # when each is free, the next first

    def copy(self) -> _Clock:
        """An independent copy."""
        return replace(self, activations={**self.activations}, written={**self.written}, slots=[*self.slots])


def timed(setting: Setting, candidate: Candidate, plan: Plan, room_bytes: Sequence[int], manner: Manner) -> Candidate:
    """Return the candidate plan with better stages for its copies, updates and releases, chosen by simulating the step.
    A stage is one block's forward or backward. `plan`: the candidate's plan, in one round. `room_bytes`: free device
    bytes of each stage, none below zero. `manner`: how the simulated link chooses transfers."""
    play = _Play(setting, candidate, plan, room_bytes, manner)
    for number in range(_STEPS * play.stages):
        play.stage(number)
    return play.candidate()


class _Play:
    """A simulation of several steps. Stages are numbered on from step to step, and seconds count from the beginning of
    the first step."""

    def __init__(
        self, setting: Setting, candidate: Candidate, plan: Plan, room_bytes: Sequence[int], manner: Manner
    ) -> None:
        self.setting, self.source, self.plan, self.manner = setting, candidate, plan, manner
        self.machine, self.stages = setting.hardware, len(plan.stages)
        self.room = [*room_bytes] * (_STEPS + 2)
        self.clock = _Clock()
        self.back_at, self.free_at = activation_turns(plan, setting.chain)
        self.stored = StoredActivations(plan, setting.chain, self.back_at)
        self.reads = [
            {Item.weight(name) for name in reads(setting.chain, plan.options, stage.direction, stage.block)}
            for stage in plan.stages
        ]
        self.gpu_update_s = self._gpu_updates()
        self.back_s = self._activations_coming()
        self.ahead_s = _AHEAD * state_ring_bytes(setting.chain) * self.machine.disk_s_per_byte
        # off the device, with a host copy that is or will be up to date; ordered by use
        self.coming: list[tuple[tuple[int, int], Window]] = []
        self.here: list[Window] = []  # fetched, not used yet
        # (order, gradient, weight) of gradients that were sent and whose weights are not updated yet
        self.gradients: list[tuple[tuple[int, int], Window, Window]] = []
        self.stale: dict[str, Window] = {}  # tensor -> its weight, off the device, waiting for the gradient
        self.lazy: list[Window] = []  # copies that may wait
        self.staying: list[Window] = []  # tensors that leave the device when their copies are done
        self.ending: list[list[Window]] = [[] for _ in self.room]  # stage -> windows with an event at its end
        windows = windows_of(setting, candidate)
        self.taken: list[Window] = []
        for step in range(-1, _STEPS):
            moved = [window.after(step * self.stages) for window in windows]
            if step == 1:
                self.taken = moved
            for window in moved:
                self._begin(window)

    def _gpu_updates(self) -> list[float]:
        """Return the seconds of the weight updates that the device runs at the end of each stage."""
        chain = self.setting.chain
        work, _ = update_work(chain, self.machine)
        updated = [sum(work[name] for name in stage.gpu_update) for stage in self.plan.stages]
        updated[-1] += sum(work[t.name] for t in chain.frame_tensors if t.trainable)
        return [n / chain.update_rates(self.machine).gpu for n in updated]

    def _activations_coming(self) -> list[float]:
        """Return, for each stage, the seconds that the link needs for activations that come back to the device."""
        sizes = [0] * self.stages
        for turn, items in self.back_at.items():
            sizes[turn // self.plan.slices] += sum(size for _, size in items)
        return [size / self.machine.h2d_bytes_per_s for size in sizes]

    def _begin(self, window: Window) -> None:
        """Add a window, a time in which a tensor may be away. Events before the first stage happen as the candidate
        says, and take no time."""
        for stage in {window.last, window.last if window.copy is None else window.copy}:
            if stage >= 0:
                self.ending[stage].append(window)
        if window.copy is not None and window.copy < 0:
            window.sent = window.copy
        if window.last >= 0:
            return
        if window.evict >= 0:
            window.sent = window.last
            self.staying.append(window)
        elif window.use >= 0 and not window.is_gradient:
            window.left = window.updated = window.evict
            if window.fetch < 0:
                window.came = window.fetch
                self.here.append(window)
            else:
                self._may_come(window)

    def stage(self, n: int) -> None:
        """Simulate stage `n`."""
        while self.coming and self.coming[0][1].use <= n:
            self._come(self.coming[0][1], n)
        for window in sorted((window for window in self.lazy if window.evict <= n), key=lambda window: window.order):
            self._send(window, n)
        for entry in [entry for entry in self.gradients if entry[0][0] == n + 1]:
            self._update(entry, n)
        start_s = self.clock.now
        end_s = self._run(n, self.clock.copy())
        self._come_early(n, end_s + self.manner.ahead * (end_s - start_s))
        self._update_early(n, end_s)
        self._send_lazily(n, end_s)
        self.clock.now = self._run(n, self.clock)
        self.here = [window for window in self.here if window.use != n]
        self._end(n)

    def _run(self, n: int, clock: _Clock) -> float:
        """Simulate the stage's computing and updates on `clock`. Returns the time when they end, in seconds."""
        s, slices, machine = n % self.stages, self.plan.slices, self.machine
        stage = self.plan.stages[s]
        option = self.setting.chain.blocks[stage.block].option(self.plan.options[stage.block])
        needed = [window for window in self.here if window.use == n]
        ready = max((window.ready_s for window in needed if window.item in self.reads[s]), default=0.0)
        seconds = option.forward_s if stage.direction is not Direction.BACKWARD else 0.0
        seconds += option.backward_s if stage.direction is not Direction.FORWARD else 0.0
        for k in range(slices):
            for item, size in self.back_at.get(s * slices + k, ()):
                there_s = self._read(item, size, clock) if item in clock.written else clock.activations[item]
                clock.h2d = max(clock.h2d, clock.now, there_s) + size / machine.h2d_bytes_per_s
                if item in self.stored.slots:
                    clock.written.pop(item, None)
                    clock.slots.append(clock.h2d)
                clock.activations[item] = clock.h2d
            own = Item.activations(stage.block, k)
            if stage.direction is Direction.BACKWARD:
                ready = max(ready, clock.activations.pop(own, 0.0))
            clock.now = max(clock.now, ready) + max(seconds, issue_s(option, stage.direction, machine))
            if stage.direction is Direction.FORWARD and option.offloaded_bytes:
                free_s = clock.slots.pop(0) if option.on_disk else 0.0
                clock.d2h = max(clock.d2h, clock.now, free_s) + option.offloaded_bytes / machine.d2h_bytes_per_s
                clock.activations[own] = clock.d2h
                if own in self.stored.sizes:
                    clock.writer = max(clock.writer, clock.d2h) + option.stored_bytes / machine.disk_write_bytes_per_s
                    clock.written[own] = clock.writer
                    clock.slots.append(clock.writer)
            for item, _ in self.free_at.get(s * slices + k, ()):
                clock.now = max(clock.now, clock.activations[item])
        ready = max((window.ready_s for window in needed), default=0.0)
        return max(clock.now, ready) + self.gpu_update_s[s]

    def _read(self, item: Item, size: int, clock: _Clock) -> float:
        """Return when activations have been read back from disk into a buffer, in seconds. Reading starts once a buffer
        is free."""
        start_s = max(clock.reader, clock.written[item], clock.slots.pop(0))
        clock.reader = start_s + size / self.machine.disk_read_bytes_per_s
        return clock.reader

    def _may_come(self, window: Window) -> None:
        insort(self.coming, (window.order, window), key=_order)

    def _come(self, window: Window, n: int) -> None:
        """Start the copy of the window's tensor to the device in stage `n`."""
        at = bisect_left(self.coming, window.order, key=_order)
        del self.coming[next(k for k in range(at, len(self.coming)) if self.coming[k][1] is window)]
        start_s = max(self.clock.h2d, self.clock.now, window.ready_s)
        self.clock.h2d = start_s + window.size / self.machine.h2d_bytes_per_s
        window.came, window.ready_s = n, self.clock.h2d
        self._take(window.size, n, window.fetch)
        self._take(-window.size, window.fetch, n)
        self.here.append(window)

    def _take(self, size: int, first: int, last: int) -> None:
        """Subtract `size` bytes from the free bytes of stages `first` to `last` - 1."""
        for n in range(first, last):
            self.room[n] -= size

    def _come_early(self, n: int, end_s: float) -> None:
        start_s, room = max(self.clock.h2d, self.clock.now), self.room
        end_s -= self.back_s[n % self.stages]
        for _, window in list(self.coming) if start_s < end_s else ():
            if window.ready_s > start_s or window.updated == n:
                continue
            if window.fetch <= n or (room[n] >= window.size and min(room[n : window.fetch]) >= window.size):
                self._come(window, n)
                start_s = max(self.clock.h2d, self.clock.now)
                if start_s >= end_s:
                    return
            elif not self.manner.overtake:
                return

    def _may_start_s(self, entry: tuple[tuple[int, int], Window, Window]) -> float:
        """Return the time in seconds at which an update may start: when the CPU is free, the gradient has come, and the
        drive is behind by no more than its buffers hold."""
        _, gradient, weight = entry
        drive_s = self.clock.drive - self.ahead_s if weight.drive_s else 0.0
        return max(self.clock.cpu, self.clock.now, gradient.sent_s, drive_s)

    def _update(self, entry: tuple[tuple[int, int], Window, Window], n: int) -> None:
        """Let the CPU update a weight whose gradient was sent."""
        self.gradients.remove(entry)
        weight = entry[2]
        start_s = self._may_start_s(entry)
        if weight.drive_s:
            self.clock.drive = max(self.clock.drive, start_s - self.ahead_s) + weight.drive_s
        self.clock.cpu = max(start_s + weight.update_s, self.clock.drive if weight.drive_s else 0.0)
        weight.updated, weight.ready_s = n, self.clock.cpu
        self._may_come(weight)

    def _update_early(self, n: int, end_s: float) -> None:
        while self.gradients and not self.setting.clip:
            now = max(self.clock.cpu, self.clock.now)
            entry = next((entry for entry in self.gradients if self._may_start_s(entry) <= now), None)
            entry = entry or min(self.gradients, key=self._may_start_s)
            if self._may_start_s(entry) >= end_s:
                return
            self._update(entry, n)

    def _send(self, window: Window, n: int) -> None:
        if window in self.lazy:
            self.lazy.remove(window)
        self.clock.d2h = max(self.clock.d2h, self.clock.now) + window.size / self.machine.d2h_bytes_per_s
        window.sent, window.sent_s = n, self.clock.d2h

    def _send_lazily(self, n: int, end_s: float) -> None:
        for window in sorted(self.lazy, key=lambda window: window.order):
            if max(self.clock.d2h, self.clock.now) >= end_s:
                return
            self._send(window, n)

    def _end(self, n: int) -> None:
        """Simulate the end of stage `n`: start copies of what the stage made, and release tensors."""
        ending = sorted(self.ending[n], key=lambda window: (not window.is_gradient, window.order))
        for window in ending:
            if window.copy == n and window.last > n:
                self.lazy.append(window)
            elif window.copy == n:
                self._send(window, n)
        for window in ending:
            if window.last == n and window.copy is None:
                self._leave(window, n)
            elif window.last == n:
                self.staying.append(window)
        for window in ending:
            if window.is_gradient:
                entry = window.order, window, self.stale.pop(window.item.name)
                insort(self.gradients, entry, key=_order)
        all_wait = self.setting.clip and (n + 1) % self.stages == 0
        for entry in [entry for entry in self.gradients if all_wait or entry[0][0] == n + 1]:  # block 0's: no gap
            self._update(entry, n)
        self._release(n)

    def _release(self, n: int) -> None:
        """Release tensors whose copies are done. Others stay where there is room for them; else the device waits for
        the copy."""
        copied = [window for window in self.staying if window.sent is not None]
        waiting = sorted(copied, key=lambda window: window.sent_s)
        stay = sum(window.size for window in waiting if window.evict <= n)
        for window in waiting:
            due = window.evict <= n
            last = (n + 1) % self.stages == 0 if window.is_gradient else n + 1 >= window.fetch
            if window.sent_s <= self.clock.now or (due and (last or stay > self.room[n + 1])):
                self.clock.now = max(self.clock.now, window.sent_s)
                stay -= window.size if due else 0
                self.staying.remove(window)
                self._leave(window, n)
        self.room[n + 1] -= stay

    def _leave(self, window: Window, n: int) -> None:
        window.left = n
        self._take(-window.size, n + 1, window.evict + 1)
        if window.update_s:
            self.stale[window.item.name] = window
        elif not window.is_gradient:
            window.ready_s = window.sent_s
            self._may_come(window)

    def candidate(self) -> Candidate:
        """Return the candidate with the stages that the simulation chose."""
        windows: dict[str, list[Window]] = {}
        for window in self.taken:
            windows.setdefault(window.item.name, []).append(window)
        schedules = tuple(
            self._schedule(schedule, windows.get(schedule.tensor.name, [])) for schedule in self.source.schedules
        )
        return replace(self.source, schedules=schedules)

    def _schedule(self, schedule: TensorSchedule, windows: list[Window]) -> TensorSchedule:
        absences: dict[str, list[Absence]] = {"w": [], "s": []}
        for window in windows:
            assert window.left is not None
            sent = None if window.sent is None else window.sent % self.stages
            if window.is_gradient:
                schedule = replace(schedule, send=sent, drop=window.left % self.stages)
                continue
            assert window.came is not None
            if window.update_s:
                assert window.updated is not None
                schedule = replace(schedule, update=window.updated % self.stages)
            if window.came > window.left + 1 or window.copy is not None or window.update_s:
                absence = Absence(evict=window.left % self.stages, prefetch=window.came % self.stages, offload=sent)
                absences[window.item.kind].append(absence)
        return replace(schedule, weight=tuple(absences["w"]), states=tuple(absences["s"]))
