"""Makes the program for a forward pass alone, for evaluation and generation, within a training plan's memory budget.

The program starts and ends between two steps, with no update pending. What the plan keeps on the device between steps
stays there. The other weights come block by block, as early as there is room, and leave again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.schedule.chain import Chain
from planner.schedule.compile import with_waits
from planner.schedule.items import STATES, Item
from planner.schedule.operations import Op, OpKind, Program, slots_of
from planner.schedule.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBytes:
    """Bytes on the device for one slice (micro-batch) in a forward without gradients; weights and buffers are not
    counted.

    start   the most before the slice arrives at its first block
    held    what the slice holds when it arrives at each block, and at the end
    peak    the most from the slice's arrival at each block to its arrival at the next, or to the end
    """

    start: int
    held: tuple[int, ...]
    peak: tuple[int, ...]

    def stage_bytes(self, index: int, slices: int) -> int:
        """The most bytes that all slices together hold while block `index` runs them one after another. Slices that it
        has run wait for the next block; the others wait for this one, or have not begun."""
        before, after = self.held[index + 1], self.held[index] if index else 0
        others = max((slices - 1) * before, (slices - 1) * after)
        return others + max(self.peak[index], 0 if index else self.start)

    def together(self, other: ForwardBytes, more_bytes: int = 0) -> ForwardBytes:
        """The larger of the two figures at every place, plus `more_bytes` everywhere."""
        return ForwardBytes(
            start=max(self.start, other.start) + more_bytes,
            held=tuple(max(pair) + more_bytes for pair in zip(self.held, other.held, strict=True)),
            peak=tuple(max(pair) + more_bytes for pair in zip(self.peak, other.peak, strict=True)),
        )


class TooLarge(ValueError):
    """No forward program fits the budget. `least_bytes`: the smallest budget that would do."""

    def __init__(self, least_bytes: int) -> None:
        super().__init__(f"a forward needs {least_bytes} bytes")
        self.least_bytes = least_bytes


def forward_program(plan: Plan, chain: Chain, measured: ForwardBytes, *, slices: int, budget_bytes: int) -> Program:
    """The program of one forward pass over `slices` slices (micro-batches): each block runs all slices before the next
    block starts, so each weight is copied to the device once.

    The program's `resident` items stay on the device. If the plan's resident items leave too little room, optimizer
    states and then also weights that have a place on the host are left out: the caller must move them to the host
    before, and back afterwards. Raises TooLarge if even that does not fit `budget_bytes`.
    """
    moved = {item for stage in plan.stages for item in (*stage.prefetch, *stage.offload)}
    states = {item for item in moved if item.kind == STATES}
    error: TooLarge | None = None
    for leaving in (frozenset[str](), states, moved):
        resident = tuple(item for item in plan.resident if item not in leaving)
        layout = _Layout(chain, measured, resident, slices)
        try:
            ops = tuple(layout.operations(budget_bytes))
        except TooLarge as refusal:
            error = refusal
            continue
        program = Program(ops=ops, resident=resident, options=(), slices=slices)
        return replace(program, ops=with_waits(ops, chain, ()))
    assert error is not None
    raise error


def forward_peak_bytes(program: Program, chain: Chain, measured: ForwardBytes) -> int:
    """The most bytes on the device at any time of a program that only runs forward. `measured`: bytes of one slice
    (micro-batch) in it."""
    layout = _Layout(chain, measured, program.resident, program.slices)
    now = peak = layout.fixed_bytes
    for op in program.ops:
        match op.kind:
            case OpKind.ALLOC:
                now += op.bytes
            case OpKind.FREE:
                now -= op.bytes
            case OpKind.RUN:
                peak = max(peak, now + measured.stage_bytes(op.turn[1], program.slices))
    return peak


class _Layout:
    """Decides when each weight that is not resident is copied to the device, so that every stage stays within the
    budget."""

    def __init__(self, chain: Chain, measured: ForwardBytes, resident: Sequence[Item], slices: int) -> None:
        self.chain, self.slices, self.slots = chain, slices, slots_of(chain)
        sizes = {t.name: {"w": t.bytes, "s": t.state_bytes} for t in chain.tensors()}
        self.sizes = {name: size["w"] for name, size in sizes.items()}
        staying = set(resident)
        self.travelling = {n: (u[0], u[-1]) for n, u in chain.users().items() if Item.weight(n) not in staying}
        self.fixed_bytes = chain.frame_bytes + sum(sizes[item.name][item.kind] for item in resident)
        self.fixed_bytes += (slices - 1) * chain.thread_bytes
        self.used = [self.fixed_bytes + measured.stage_bytes(i, slices) for i in range(len(chain.blocks))]
        for name, (first, last) in self.travelling.items():
            for stage in range(first, last + 1):
                self.used[stage] += self.sizes[name]

    def operations(self, budget_bytes: int) -> Iterator[Op]:
        """The operations in serial order. Raises TooLarge."""
        if max(self.used) > budget_bytes:
            raise TooLarge(max(self.used))
        comes = self._comes(budget_bytes)
        for stage in range(len(self.chain.blocks)):
            label = f"F{stage}"
            for name in (name for name, at in comes.items() if at == stage):
                item, size = Item.weight(name), self.sizes[name]
                slot = self.slots.get(name)
                if slot is not None:
                    yield Op(kind=OpKind.READ, stage=label, subject=item, bytes=size, slot=slot)
                yield Op(kind=OpKind.ALLOC, stage=label, subject=item, bytes=size)
                yield Op(kind=OpKind.FETCH, stage=label, subject=item, bytes=size, slot=slot)
            for k in range(self.slices):
                yield Op(kind=OpKind.RUN, stage=label, subject=f"{label}.{k}")
            for name, (_, last) in self.travelling.items():
                if last == stage:
                    yield Op(kind=OpKind.FREE, stage=label, subject=Item.weight(name), bytes=self.sizes[name])

    def _comes(self, budget_bytes: int) -> dict[str, int]:
        """Maps each weight to the stage at whose start its copy is issued: as early as it fits, in the order of first
        use."""
        comes: dict[str, int] = {}
        earliest = 0
        for name, (first, _) in self.travelling.items():
            at = first
            while at > earliest and self.used[at - 1] + self.sizes[name] <= budget_bytes:
                at -= 1
                self.used[at] += self.sizes[name]
            comes[name] = earliest = at
        return comes
