"""Models a candidate stage by stage in numbers, to compute the time of a step quickly while schedules change.

The operations of every stage are those of `planner.schedule.serial_order`. The step is as long as in
`planner.schedule.simulate`, to the last bit: clipping, rounds, shared cores and offloaded activations included. When a
schedule changes, only the stages that it changes are written anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from planner.candidate.candidate import WORDS, Candidate, Entry, TensorSchedule, assemble, entries_of, stage_of
from planner.candidate.setting import Setting
from planner.schedule.compile import Op, OpKind, Program, Queue, accesses, overwritten
from planner.schedule.plan import Plan
from planner.schedule.serial_order import SerialOrder
from planner.schedule.simulate import STEPS, Durations

_TURN, _UPDATE, _FREE, _FETCH, _SEND, _CPU, _READ, _WRITE = range(8)  # the first three on the computing queue
_KIND = {Queue.D2H: _SEND, Queue.CPU: _CPU, Queue.DISK_READ: _READ, Queue.DISK_WRITE: _WRITE}
_Numbers = tuple[int, ...]
_Work = tuple[int, float, _Numbers, _Numbers, tuple[str, ...]]  # kind, seconds, copies read and written, subjects


@dataclass(slots=True)
class _Copies:
    """Numbers for copies of data ("d:" + item, "h:" + item, …). Copies that only one queue touches have no number."""

    number: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, touched: Iterable[tuple[Queue, Iterable[tuple[str, bool]]]]) -> _Copies:
        first: dict[str, Queue] = {}
        numbered = cls()
        for queue, copies in touched:
            for copy, _ in copies:
                if first.setdefault(copy, queue) is not queue:
                    numbered.number.setdefault(copy, len(numbered.number))
        return numbered

    def these(self, copies: Iterable[tuple[str, bool]]) -> tuple[_Numbers, _Numbers]:
        """The numbers of the copies of data that are read, and of those that are written. `copies`: pairs (name,
        whether it is written)."""
        read: list[int] = []
        written: list[int] = []
        for copy, writes in copies:
            if copy in self.number:
                (written if writes else read).append(self.number[copy])
        return tuple(read), tuple(written)


class StageModel:
    """The stages of one candidate in numbers, with `schedules` that may be changed. `program`: the operations before
    any change."""

    def __init__(self, setting: Setting, candidate: Candidate) -> None:
        chain = setting.chain
        self.setting, self.candidate, self.schedules = setting, candidate, list(candidate.schedules)
        self.plan: Plan = assemble(chain, candidate, slices=setting.slices, rounds=setting.rounds, clip=setting.clip)
        self._order = SerialOrder(self.plan, chain)
        self._durations = Durations(candidate.options, chain, setting.hardware)
        count, rounds = len(self.plan.stages), setting.rounds
        ops = [[list(self._order.stage(n, r)) for n in range(count)] for r in range(rounds)]
        serial = tuple(op for stages in ops for stage in stages for op in stage)
        self.program = Program(
            ops=serial,
            resident=self.plan.resident,
            options=candidate.options,
            slices=setting.slices,
            rounds=rounds,
            clip=setting.clip,
        )
        self._lost = overwritten(chain, serial)
        touched = [[[self._touched(op) for op in stage] for stage in stages] for stages in ops]
        flat = (
            (op.queue, copies)
            for stages, all_copies in zip(ops, touched, strict=True)
            for stage, of_stage in zip(stages, all_copies, strict=True)
            for op, copies in zip(stage, of_stage, strict=True)
        )
        self._copies = _Copies.of(flat)
        self._work = [
            [self._encoded(stage, copies) for stage, copies in zip(stages, all_copies, strict=True)]
            for stages, all_copies in zip(ops, touched, strict=True)
        ]
        self._lists: list[dict[str, list[Entry]]] = []
        self._entries: list[list[Entry]] = []

    def _touched(self, op: Op) -> list[tuple[str, bool]]:
        return list(accesses(op, self.setting.chain, self.candidate.options, self._lost))

    def _encoded(self, ops: Sequence[Op], touched: Sequence[list[tuple[str, bool]]]) -> list[_Work]:
        """A stage's operations in numbers. A release only waits. What is fetched must be allocated before, so its fetch
        waits until the computing queue has got there."""
        works: list[_Work] = []
        freed: list[int] = []
        gone: list[str] = []

        def free() -> None:
            if freed:
                works.append((_FREE, 0.0, tuple(freed), (), tuple(gone)))
                freed.clear()
                gone.clear()

        for op, copies in zip(ops, touched, strict=True):
            read, written = self._copies.these(copies)
            queue = op.queue
            if op.kind is OpKind.FREE:
                freed += written
                gone += [op.subject] * len(written)
                continue
            if queue is Queue.COMPUTE:
                free()
            seconds = self._durations.of(op)
            if op.kind is OpKind.FETCH:
                works.append((_FETCH, seconds, read, written, (op.subject,)))
            elif queue is not Queue.COMPUTE:
                works.append((_KIND[queue], seconds, read, written, (op.subject,)))
            elif op.kind is OpKind.RUN:
                works.append((_TURN, seconds, read, written, (op.subject,)))
            elif op.kind is not OpKind.ALLOC and (seconds or read or written):
                works.append((_UPDATE, seconds, read, written, (op.subject,)))
        free()
        return works

    def change(self, changed: Iterable[tuple[int, TensorSchedule]]) -> None:
        """Replace the schedules with these numbers by others with other stages. The same items must move as before, and
        the same side must update each tensor."""
        if not self._lists:
            self._list()
        stages: set[int] = set()
        for number, schedule in changed:
            before = self._entries[number]
            after = entries_of(self.setting.chain, schedule, number, rounds=self.setting.rounds)
            self.schedules[number], self._entries[number] = schedule, after
            gone, come = [e for e in before if e not in after], [e for e in after if e not in before]
            for entry in gone:
                self._lists[entry.stage][entry.word].remove(entry)
            for entry in come:
                self._lists[entry.stage][entry.word].append(entry)
            stages.update(entry.stage for entry in (*gone, *come))
            stages.update(self._others(schedule))
        old = self._order.stages
        self._order.replace({n: stage_of(old[n].block, old[n].direction, self._lists[n]) for n in stages})
        for r, work in enumerate(self._work):
            for n in stages:
                ops = list(self._order.stage(n, r))
                work[n] = self._encoded(ops, [self._touched(op) for op in ops])

    def _others(self, schedule: TensorSchedule) -> Iterator[int]:
        """Stages whose order depends on when the tensor comes or is updated, although their lists do not change."""
        if schedule.states and schedule.update is not None:
            yield schedule.update  # updates on the device go in the order of arrival
        if self.setting.clip and schedule.send is not None:
            yield len(self._lists) - 1  # updates that wait for the norm, and replays

    def _list(self) -> None:
        self._lists = [{word: [] for word in WORDS} for _ in self.plan.stages]
        for number, schedule in enumerate(self.schedules):
            entries = entries_of(self.setting.chain, schedule, number, rounds=self.setting.rounds)
            self._entries.append(entries)
            for entry in entries:
                self._lists[entry.stage][entry.word].append(entry)

    def step_s(self) -> float:
        """Seconds of a step, as `planner.schedule.simulate` would compute them."""
        return _played_s(self._step(), len(self._copies.number))

    @property
    def size(self) -> int:
        """The number of operations in a step."""
        return sum(len(stage) for stages in self._work for stage in stages)

    def critical(self) -> list[tuple[str, str]]:
        """What determines the step's length and could be moved: ("fetch", item) if the item's fetch waited for the
        device, ("evict", item) if the item's release waited for its copy to the host."""
        return _critical(self._step(), len(self._copies.number))

    def _step(self) -> list[_Work]:
        work = [item for stages in self._work for stage in stages for item in stage]
        part = self.setting.hardware.shared_compute
        return _sharing(work, part) if part else work


def _sharing(work: Sequence[_Work], part: float) -> list[_Work]:
    """The work, in which a block's run takes longer by a part of what other queues do at about that time, as in
    `planner.schedule.simulate`."""
    turns = [number for number, item in enumerate(work) if item[0] == _TURN]
    shared, pending = list(work), 0.0
    for number in (*range(turns[-1] + 1, len(work)), *range(turns[-1] + 1)):
        kind, seconds, reads, writes, subjects = work[number]
        if kind > _FREE:
            pending += part * seconds
        elif kind == _TURN:
            shared[number] = kind, seconds + pending, reads, writes, subjects
            pending = 0.0
    return shared


def _played_s(work: Sequence[_Work], copies: int) -> float:
    """Seconds of the last of a few steps. Each operation starts after all earlier ones that touch the same copy, if one
    of the two writes it."""
    written = [0.0] * copies  # when a copy is there
    used = [0.0] * copies  # when the last of its readers and writers is done
    now = h2d = d2h = cpu = disk = writer = before = 0.0
    for _ in range(STEPS):
        before = now
        for kind, seconds, reads, writes, _ in work:
            if kind <= _UPDATE:
                for i in reads:
                    if written[i] > now:
                        now = written[i]
                for i in writes:
                    if used[i] > now:
                        now = used[i]
                now += seconds
                for i in writes:
                    written[i] = used[i] = now
                continue
            if kind == _FREE:
                for i in reads:
                    if used[i] > now:
                        now = used[i]
                continue
            if kind == _FETCH:
                at = h2d if h2d > now else now
            else:
                at = d2h if kind == _SEND else cpu if kind == _CPU else disk if kind == _READ else writer
            for i in reads:
                if written[i] > at:
                    at = written[i]
            for i in writes:
                if used[i] > at:
                    at = used[i]
            at += seconds
            for i in reads:
                if at > used[i]:
                    used[i] = at
            for i in writes:
                written[i] = used[i] = at
            if kind == _FETCH:
                h2d = at
            elif kind == _SEND:
                d2h = at
            elif kind == _CPU:
                cpu = at
            elif kind == _READ:
                disk = at
            else:
                writer = at
    return now - before


def _critical(work: Sequence[_Work], copies: int) -> list[tuple[str, str]]:
    """The longest path to the end of a few steps, followed back over two of them. Each operation depends on the one for
    which it waited last: the one before it in its queue, if no other ended later."""
    written, used = [0.0] * copies, [0.0] * copies
    wrote, last_use = [-1] * copies, [-1] * copies  # numbers of operations
    free, last = [0.0] * 6, [-1] * 6  # computing, and the other queues
    hangs: list[tuple[int, int]] = []  # the operation waited for, and by which of its own copies
    for at in range(STEPS * len(work)):
        kind, seconds, reads, writes, _ = work[at % len(work)]
        queue = max(0, kind - _FREE)
        now, before, by = free[queue], last[queue], -1
        if kind == _FETCH and free[0] > now:
            now, before, by = free[0], last[0], 0
        ready, users = (used, last_use) if kind == _FREE else (written, wrote)
        for n, i in enumerate(reads):
            if ready[i] > now:
                now, before, by = ready[i], users[i], n
        for i in writes:
            if used[i] > now:
                now, before, by = used[i], last_use[i], -1
        now += seconds
        hangs.append((before, by))
        free[queue], last[queue] = now, at
        for i in reads if queue else ():
            if now > used[i]:
                used[i], last_use[i] = now, at
        for i in writes:
            written[i] = used[i] = now
            wrote[i] = last_use[i] = at
    moves: dict[tuple[str, str], None] = {}
    at = last[0]
    while at >= (STEPS - 2) * len(work):
        kind, _, _, _, subjects = work[at % len(work)]
        before, by = hangs[at]
        if kind == _FREE and by >= 0:
            moves["evict", subjects[by]] = None
        elif kind == _FETCH and before >= 0 and work[before % len(work)][0] <= _FREE:
            moves["fetch", subjects[0]] = None
        at = before
    return list(moves)
