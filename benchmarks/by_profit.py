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

from planner.candidate.candidate import (
    Absence,
    Candidate,
    Side,
    TensorSchedule,
    assemble,
    at_home,
    backward_stage,
    movable,
)
from planner.candidate.setting import Setting
from planner.greedy.streaming import resident
from planner.schedule.chain import Tensor
from planner.schedule.compile import OpKind, order_program
from planner.schedule.memory_use import gpu_usage
from planner.schedule.simulate import durations_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Block `block` is away after its forward, or after its backward: the paper's (k, 1), (k, 0)."""

    block: int
    after_forward: bool


@dataclass(slots=True)
class _Window:
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
            chain,
            resident(setting, options, "resident"),
            slices=setting.slices,
            rounds=setting.rounds,
            clip=setting.clip,
        )
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

    def windows(self, chosen: list[Choice]) -> list[_Window]:
        """Algorithm 2: the windows with their stages."""
        room = [self.setting.budgets.gpu_bytes - peak for peak in self.peak]
        windows = [_Window(choice, *self.gap(choice)) for choice in chosen]
        for window in windows:
            for s in self.covered(window.choice):
                room[s] += self.bytes[window.choice.block]
        self._send(windows, room)
        self._fetch(windows, room)
        return windows

    def _send(self, windows: list[_Window], room: list[int]) -> None:
        """First in, first out from the head's backward on; a weight stays until it has been sent, if there is room."""
        head, ends = self._ends()
        after_backward = {window.choice.block for window in windows if not window.choice.after_forward}
        free_s = 0.0
        for window in sorted(windows, key=lambda window: (window.start - head) % self.stages):
            window.evict = window.start
            if window.choice.after_forward and window.choice.block in after_backward:
                continue  # the copy made after backward is still right
            window.send = window.start
            free_s = max(free_s, ends[window.start % self.stages])
            free_s += self.bytes[window.choice.block] / self.setting.hardware.d2h_bytes_per_s
            while (
                window.evict + 1 < window.end
                and room[(window.evict + 1) % self.stages] >= self.bytes[window.choice.block]
            ):
                if self._end_s(window.evict - window.start, window.start, ends) >= free_s:
                    break
                window.evict += 1
                room[window.evict % self.stages] -= self.bytes[window.choice.block]

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

    def _fetch(self, windows: list[_Window], room: list[int]) -> None:
        """In the order of their use, none before the one that is used earlier, as early as there is room."""
        head = (self.stages - 1) // 2
        earliest = 0
        for window in sorted(windows, key=lambda window: (window.end - head) % self.stages or self.stages):
            turn = self.stages * ((window.end - head - 1) // self.stages)  # stages of the cycle that starts at the head
            window.prefetch = window.end
            floor = max(window.evict + 1, earliest + turn)
            while (
                window.prefetch > floor and room[(window.prefetch - 1) % self.stages] >= self.bytes[window.choice.block]
            ):
                window.prefetch -= 1
                room[window.prefetch % self.stages] -= self.bytes[window.choice.block]
            earliest = window.prefetch - turn

    def candidate(self, windows: list[_Window]) -> Candidate:
        """The windows as schedules; all else stays at home."""
        chain, clip = self.setting.chain, self.setting.clip
        absences: dict[int, list[Absence]] = {}
        for window in sorted(windows, key=lambda window: window.start):
            offload = None if window.send is None else window.send % self.stages
            absence = Absence(evict=window.evict % self.stages, prefetch=window.prefetch % self.stages, offload=offload)
            absences.setdefault(window.choice.block, []).append(absence)
        schedules = {t.name: at_home(chain, t, clip) for t in chain.tensors()}
        for block, found in absences.items():
            for tensor in self.tensors[block]:
                schedules[tensor.name] = self._schedule(tensor, block, tuple(found))
        return Candidate(options=tuple(self.options), schedules=tuple(schedules.values()), source="by profit")

    def _schedule(self, tensor: Tensor, block: int, absences: tuple[Absence, ...]) -> TensorSchedule:
        if not tensor.trainable:
            return TensorSchedule(tensor=tensor, side=Side.NOBODY, weight=tuple(_unsent(absences)))
        return TensorSchedule(
            tensor=tensor, side=Side.GPU, update=backward_stage(self.setting.chain, block), weight=absences
        )


def _unsent(absences: Sequence[Absence]) -> Iterator[Absence]:
    """Frozen weights never change: the host's copy is always right."""
    for absence in absences:
        yield Absence(evict=absence.evict, prefetch=absence.prefetch)


def by_profit(setting: Setting, options: Sequence[str], *, spare: int) -> Candidate | None:
    """The greedy plan of paper 004 with these options; None where weights alone cannot make it fit.

    `spare`: weights that algorithm 1 makes room for beyond what is read. The paper's formula has one, so that the next
    weight can come; a stage here holds also the one that leaves until its end: 2. With clipping there is no such plan:
    the update waits for the norm with its weight on the device.
    """
    if setting.clip:
        return None
    search = _Search(setting, options)
    chosen = search.choices(spare)
    return None if chosen is None else search.candidate(search.windows(chosen))
