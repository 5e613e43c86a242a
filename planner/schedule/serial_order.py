"""Writes the operations of a plan's step in a serial order that is correct without any waits.

A step is `plan.rounds` rounds, each through all stages with `plan.slices` slices (micro-batches). Weights come and go
in every round, and gradients that leave come back for the next one. What belongs to the update happens once a step: the
update, the transfers of its states and the copies of what it changed. It happens in the last round or, past the step's
end, in the first round of the next step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from planner.schedule.activation_turns import StoredActivations, activation_turns
from planner.schedule.chain import Chain
from planner.schedule.items import GRADIENT, STATES, WEIGHT, Item
from planner.schedule.operations import (
    SLOTS,
    STATE_SLOTS,
    Op,
    OpKind,
    Queue,
    gradient_slots_of,
    slots_of,
    state_slots_of,
)
from planner.schedule.plan import Direction, Plan, Stage


def serial_order(plan: Plan, chain: Chain, *, by_pieces: bool = True) -> Iterator[Op]:
    """All operations of a step, in serial order. Without `by_pieces`, each update of optimizer states on disk is one
    operation, and nothing is read or written for it. Raises ValueError for a plan that moves items that the chain does
    not have."""
    order = SerialOrder(plan, chain, by_pieces=by_pieces)
    for number in range(plan.rounds):
        for n in range(len(plan.stages)):
            yield from order.stage(n, number)


class SerialOrder:
    """The operations of a plan in serial order, generated stage by stage. `replace` changes single stages of the
    plan."""

    def __init__(self, plan: Plan, chain: Chain, *, by_pieces: bool = True) -> None:
        self.plan, self.chain = plan, chain
        self.tensors = {t.name: t for t in (*chain.tensors(), *chain.frame_tensors)}
        kinds = (WEIGHT, GRADIENT, STATES)
        self.sizes = {Item.of(kind, t.name): t.item_bytes(kind) for t in self.tensors.values() for kind in kinds}
        unknown = [i for s in plan.stages for i in (*s.prefetch, *s.offload, *s.evict) if i not in self.sizes]
        if unknown:
            raise ValueError(f"the plan moves what the chain does not have: {', '.join(unknown)}")
        self.users = chain.users()
        self.slots = {WEIGHT: slots_of(chain), GRADIENT: gradient_slots_of(chain), STATES: {}}
        self.pieces = state_slots_of(chain, clip=plan.clip) if by_pieces else {}
        self.stages = list(plan.stages)
        self.names = [stage.name for stage in plan.stages]
        stages = list(enumerate(plan.stages))
        self.gpu_update = {name: n for n, stage in stages for name in stage.gpu_update}
        self.sent = {item: n for n, stage in reversed(stages) for item in stage.offload if item.kind == GRADIENT}
        self.dropped = {
            item: n for n, stage in reversed(stages) for item in stage.evict if n >= self.sent.get(item, len(stages))
        }
        self.travelling = {item.name for _, stage in stages for item in stage.offload if item.kind in (WEIGHT, STATES)}
        self.arrival = {item: (n, k) for n, stage in stages for k, item in enumerate(stage.prefetch)}
        self.ahead, self.trailing = plan.ahead(), plan.trailing()
        self.early = OpKind.CPU_AHEAD if plan.clip else OpKind.CPU_UPDATE
        self.back_at, self.free_at = activation_turns(plan, chain)
        self.stored = StoredActivations(plan, chain, self.back_at)

    def replace(self, changed: Mapping[int, Stage]) -> None:
        """Replace the stages with these numbers. The same items must move as before, and the same side (CPU or GPU)
        must update each tensor."""
        for n, stage in changed.items():
            self.stages[n] = stage
            self.sent |= {item: n for item in stage.offload if item.kind == GRADIENT}
            self.arrival |= {item: (n, k) for k, item in enumerate(stage.prefetch)}
        for n, stage in changed.items():
            self.dropped |= {item: n for item in stage.evict if n >= self.sent.get(item, len(self.stages))}

    def stage(self, n: int, r: int) -> Iterator[Op]:
        """The operations of stage number `n` in round `r`, in serial order."""
        plan, stage = self.plan, self.stages[n]
        gradients = self._made(stage, r)
        yield from self._stage_start(n, stage, r, gradients)
        for k in range(plan.slices):
            number = n * plan.slices + k
            if number == self.stored.first_turn:
                yield from (self._read(item, n, r) for item in self.stored.first)
            for item, size in self.back_at.get(number, ()):
                yield Op(kind=OpKind.ALLOC, stage=self.names[n], subject=item, bytes=size, round=r)
                slot = self.stored.reads.get(item, self.stored.slots.get(item))
                yield Op(kind=OpKind.FETCH, stage=self.names[n], subject=item, bytes=size, round=r, slot=slot)
                if item in self.stored.after:  # its slot is free
                    yield self._read(self.stored.after[item], n, r)
            yield Op(kind=OpKind.RUN, stage=self.names[n], subject=f"{self.names[n]}.{k}", round=r)
            option = self.chain.blocks[stage.block].option(plan.options[stage.block])
            if stage.direction is Direction.FORWARD and option.offloaded_bytes:
                item = Item.activations(stage.block, k)
                sent = Op(
                    kind=OpKind.SEND,
                    stage=self.names[n],
                    subject=item,
                    bytes=option.offloaded_bytes,
                    round=r,
                    slot=self.stored.slots.get(item),
                )
                yield sent
                if item in self.stored.sizes:
                    yield replace(sent, kind=OpKind.WRITE, bytes=self.stored.sizes[item])
            for item, size in self.free_at.get(number, ()):
                yield Op(kind=OpKind.FREE, stage=self.names[n], subject=item, bytes=size, round=r)
        yield from self._stage_end(n, stage, r, gradients)

    def _read(self, item: Item, n: int, r: int) -> Op:
        """The read of activations from disk."""
        slot, size = self.stored.reads[item], self.stored.sizes[item]
        return Op(kind=OpKind.READ, stage=self.names[n], subject=item, bytes=size, round=r, slot=slot)

    def _last(self, r: int) -> bool:
        return r == self.plan.rounds - 1

    def _fetched(self, item: Item, r: int) -> bool:
        """Whether round `r` fetches the item: gradients come back after the first round, states in the last one, for
        the update."""
        return {WEIGHT: True, GRADIENT: r > 0, STATES: self._last(r)}[item.kind]

    def _once(self, item: Item, n: int, r: int) -> bool:
        """Whether stage `n` of round `r` is the first stage `n` after the item's update on the device."""
        return self._last(r) if n >= self.gpu_update.get(item.name, 0) else r == 0

    def _sends(self, item: Item, n: int, r: int) -> bool:
        if item.kind == GRADIENT:  # the CPU needs each sum; an update on the device needs the last one there
            return item.name not in self.gpu_update or not self._last(r)
        return self._once(item, n, r)

    def _evicts(self, item: Item, n: int, r: int) -> bool:
        update = self.gpu_update.get(item.name)
        if item.kind == GRADIENT and update is not None:
            travels = item in self.sent
            if self._last(r):
                return n >= update or not travels
            return travels and self.dropped.get(item) == n
        return item.kind != STATES or self._once(item, n, r)

    def _made(self, stage: Stage, r: int) -> frozenset[Item]:
        """Items that the stage changes, so that their copy to the host can start only at its end."""
        grads = self.chain.blocks[stage.block].tensors if stage.direction is not Direction.FORWARD else ()
        updated = stage.gpu_update if self._last(r) else ()
        return frozenset(
            [Item.gradient(t.name) for t in grads if t.trainable]
            + [item for name in updated for item in (Item.weight(name), Item.states(name))]
        )

    def _stage_start(self, n: int, stage: Stage, r: int, gradients: frozenset[Item]) -> Iterator[Op]:
        fetches = [self._move(OpKind.FETCH, n, item, r) for item in stage.prefetch if self._fetched(item, r)]
        for through_slot, together in itertools.groupby(fetches, key=lambda fetch: fetch.slot is not None):
            if not through_slot:  # allocate for all first, so that they wait once
                run = list(together)
                yield from (self._move(OpKind.ALLOC, n, fetch.item, r) for fetch in run)
                yield from run
                continue
            for fetch in together:
                yield from (replace(fetch, kind=OpKind.READ), replace(fetch, kind=OpKind.ALLOC, slot=None), fetch)
        for item in stage.offload:
            if item not in gradients and self._sends(item, n, r):
                yield from self._sent(n, item, r)
        for name in stage.cpu_update:
            if Item.gradient(name) not in gradients and not self._waits_for_norm(name):
                carried = n < self.sent.get(Item.gradient(name), n + 1)  # the gradient of the step before
                if r == 0 if carried else self._last(r):
                    yield from self._update_on_cpu(self.early, n, name, r, carried=carried)
        if r == 0:
            yield from self._trailing_states(n, stage)

    def _stage_end(self, n: int, stage: Stage, r: int, gradients: frozenset[Item]) -> Iterator[Op]:
        if self._last(r):
            yield from self._updates(n, stage, r, gradients)
        for item in stage.offload:
            if item in gradients and self._sends(item, n, r):
                yield from self._sent(n, item, r)
        updates = list(self._cpu_updates(n, stage, r, gradients)) if self._last(r) else []
        stale = {Item.weight(name) for op in updates for name in op.names}  # freed before the host has newer ones
        evicted = [item for item in stage.evict if self._evicts(item, n, r)]
        yield from (self._move(OpKind.FREE, n, item, r) for item in evicted if item in stale)
        yield from updates
        yield from (self._move(OpKind.FREE, n, item, r) for item in evicted if item not in stale)

    def _updates(self, n: int, stage: Stage, r: int, gradients: frozenset[Item]) -> Iterator[Op]:
        """Norms and the clip coefficient, then the updates on the device."""
        last = n == len(self.stages) - 1
        frame = tuple(t.name for t in self.chain.frame_tensors if t.trainable)
        if self.plan.clip:
            complete = tuple(
                item.name for item in sorted(gradients) if item.kind == GRADIENT and self._completes(item.name, stage)
            )
            if complete:
                yield Op(kind=OpKind.NORM, stage=self.names[n], subject=",".join(complete), round=r)
            if last:
                if frame:
                    yield Op(kind=OpKind.NORM, stage=self.names[n], subject=",".join(frame), round=r)
                yield Op(kind=OpKind.CLIP, stage=self.names[n], subject="all", round=r)
        for names in self._apart((*stage.gpu_update, *(frame if last else ())), n):
            scratch = max(self.tensors[name].scratch_bytes for name in names)
            yield Op(kind=OpKind.UPDATE, stage=self.names[n], subject=",".join(names), bytes=scratch, round=r)

    def _apart(self, names: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
        """Groups of tensors that are updated together in stage `n`: first all whose states stay on the device, then
        each other tensor alone, in order of arrival. So its update waits for its own states only, and its copies for
        its own update."""

        def waits(name: str) -> tuple[int, int]:
            fetched, place = self.arrival.get(Item.states(name), (n + 1, 0))  # states that never leave come first
            return -((n - fetched) % len(self.stages)), place

        if staying := tuple(name for name in names if name not in self.travelling):
            yield staying
        for name in sorted((name for name in names if name in self.travelling), key=waits):
            yield (name,)

    def _cpu_updates(self, n: int, stage: Stage, r: int, gradients: frozenset[Item]) -> Iterator[Op]:
        """CPU updates at the stage's end: those whose gradients the stage made. With clipping, the last stage has all
        updates that waited for the norm, and repeats those that ran before it was known."""
        for name in stage.cpu_update:
            if Item.gradient(name) in gradients and not self._waits_for_norm(name):
                yield from self._update_on_cpu(self.early, n, name, r)
        if self.plan.clip and n == len(self.stages) - 1:
            for _, names in itertools.groupby(self._by_need(), key=lambda name: self.users[name][0]):
                yield from self._of_block(list(names), n, r)

    def _of_block(self, names: Sequence[str], n: int, r: int) -> Iterator[Op]:
        """The operations that waited for the norm, for tensors that are needed at the same time. Updates of whole
        tensors are spread evenly between those of pieces from disk: one after another they would make the drive wait,
        whose slots would be full."""
        parts: list[tuple[float, tuple[Op, ...]]] = []
        for stored in (False, True):
            ops = [op for name in names if (name in self.pieces) == stored for op in self._after_norm(name, n, r)]
            same = [list(each) for _, each in itertools.groupby(ops, key=_what_of)]
            parts += [((k + 0.5) / len(same), tuple(each)) for k, each in enumerate(same)]
        for _, each in sorted(parts, key=lambda part: part[0]):
            yield from each

    def _after_norm(self, name: str, n: int, r: int) -> Iterator[Op]:
        if name in self.trailing:
            yield from self._weight_on_cpu(n, name, r)
        else:
            kind = OpKind.CPU_UPDATE if self._waits_for_norm(name) else OpKind.CPU_REPLAY
            yield from self._update_on_cpu(kind, n, name, r)

    def _sent(self, n: int, item: Item, r: int) -> Iterator[Op]:
        """Copy the item to the host and, if it has a slot, from there to disk."""
        send = self._move(OpKind.SEND, n, item, r)
        yield send
        if send.slot is not None:
            yield replace(send, kind=OpKind.WRITE)

    def _update_on_cpu(self, kind: OpKind, n: int, name: str, r: int, *, carried: bool = False) -> Iterator[Op]:
        """The update of a tensor on the CPU. If its states are on disk, it goes piece by piece: read, update, write. If
        the tensor is entirely on disk, its gradient is read first, and the new weight is written from the gradient's
        slot."""
        update = Op(kind=kind, stage=self.names[n], subject=name, carried=carried, round=r)
        if name not in self.pieces:
            yield update
            return
        gradient = replace(self._move(OpKind.READ, n, Item.gradient(name), r), carried=carried)
        if gradient.slot is not None:
            yield gradient
        for piece, slot in self.pieces[name]:
            its = replace(update, subject=f"{name}#{piece.number}", slot=slot)
            states = replace(its, subject=Item.states(name, piece.number), bytes=piece.bytes)
            yield from (replace(states, kind=OpKind.READ), its, replace(states, kind=OpKind.WRITE))
        if gradient.slot is not None:
            weight = Item.weight(name)
            yield replace(gradient, kind=OpKind.WRITE, subject=weight, bytes=self.sizes[weight])

    def _weight_on_cpu(self, n: int, name: str, r: int) -> Iterator[Op]:
        """Update only the weight, piece by piece; the states are read, and stay on disk as they are."""
        for piece, slot in self.pieces.get(name, ()):
            weight = Op(
                kind=OpKind.CPU_WEIGHT, stage=self.names[n], subject=f"{name}#{piece.number}", round=r, slot=slot
            )
            yield replace(weight, kind=OpKind.PEEK, subject=Item.states(name, piece.number), bytes=piece.bytes)
            yield weight

    def _trailing_states(self, n: int, stage: Stage) -> Iterator[Op]:
        """Update the states of weights that were updated at the end of the step before: read, update, write."""
        pieces = [(name, piece) for name in stage.states_update for piece, _ in self.pieces.get(name, ())]
        for number, (name, piece) in enumerate(pieces):
            its = Op(
                kind=OpKind.CPU_STATES,
                stage=self.names[n],
                subject=f"{name}#{piece.number}",
                slot=SLOTS + number % STATE_SLOTS,
                carried=True,
            )
            states = replace(its, subject=Item.states(name, piece.number), bytes=piece.bytes)
            yield from (replace(states, kind=OpKind.READ), its, replace(states, kind=OpKind.WRITE))

    def _waits_for_norm(self, name: str) -> bool:
        return self.plan.clip and name not in self.ahead

    def _by_need(self) -> list[str]:
        """All tensors that the CPU updates; those that the next step needs first come first."""
        order = {name: number for number, s in enumerate(self.stages) for name in s.cpu_update}
        return sorted(order, key=lambda n: (self.users[n][0], order[n]))

    def _move(self, kind: OpKind, n: int, item: Item, r: int) -> Op:
        """A copy, through a slot if the item is on disk; or an ALLOC or FREE, which concern the device alone."""
        slot = self.slots[item.kind].get(item.name) if kind not in _WITHOUT_SLOT else None
        return Op(kind=kind, stage=self.names[n], subject=item, bytes=self.sizes[item], round=r, slot=slot)

    def _completes(self, name: str, stage: Stage) -> bool:
        """Whether the stage is the last that adds to the gradient of `name`: the backward of its first block."""
        return self.users[name][0] == stage.block


_WITHOUT_SLOT = (OpKind.ALLOC, OpKind.FREE)


def _what_of(op: Op) -> object:
    """A key shared by the operations that read, update and write one piece of a tensor's states."""
    if op.piece is None:
        return op.subject
    return (op.names[0] if op.queue is Queue.CPU else op.item.name), op.piece
