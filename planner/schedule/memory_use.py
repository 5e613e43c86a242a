"""Computes how many bytes a program takes on the device, operation by operation, and on the host.

Only the computing queue allocates and frees, so its order alone fixes what is on the device at any time. Walking
through that order gives the exact peak, however fast copies and CPU updates are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace

from planner.schedule.chain import Chain, Option, Tensor
from planner.schedule.compile import Op, OpKind, Program, Queue
from planner.schedule.items import ACTIVATIONS, GRADIENT, STATES, WEIGHT, Item
from planner.schedule.operations import ACTIVATION_SLOTS, GRADIENT_SLOTS, SLOTS, STATE_SLOTS
from planner.schedule.peak_moments import LOSS_BYTES, NORM_BYTES, lasting_bytes, tied_rows
from planner.schedule.plan import Direction, Plan, stage_order
from planner.schedule.state_pieces import PAGE, whole_pages

_BETWEEN = 4 * PAGE  # for gaps between tensors, which begin at multiples of 64 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes on the device around one operation of the computing queue: the most during the operation, and those after
    it."""

    op: Op
    peak_bytes: int
    after_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Bytes on the device, by what they are for. A slice is one micro-batch; the frame is all of the model outside its
    blocks.

    frame_bytes      the frame's weights, states and sums of gradients, and norms
    weights_bytes, gradients_bytes, states_bytes    of the blocks' tensors; for a tied embedding, gradients include the
                     rows kept for each token (`planner.schedule.peak_moments.Rows`)
    saved_bytes      activations that stay from forward to backward, block inputs included
    offloaded_bytes  activations on their way to the host or back
    waiting_bytes    what slices between two blocks hold, the next block's input included
    running_bytes    what the running operation needs beside all that: temporary memory of a block on a slice, its
                     outputs and unfinished gradients, or an update's scratch
    """

    frame_bytes: int = 0
    weights_bytes: int = 0
    gradients_bytes: int = 0
    states_bytes: int = 0
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    waiting_bytes: int = 0
    running_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of all parts, in bytes."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """A `Usage` divided by purpose: `peak` adds up to `usage.peak_bytes`, `after` to `usage.after_bytes`."""

    usage: Usage
    peak: Parts
    after: Parts


def gpu_usage(program: Program, chain: Chain) -> Iterator[Usage]:
    """The bytes on the device at each operation of the computing queue. `program` must be one that
    `planner.schedule.verify` accepts."""
    return (Usage(op=op, peak_bytes=peak, after_bytes=after) for op, peak, after in _Walk(program, chain).run())


def gpu_peaks(program: Program, chain: Chain) -> Iterator[tuple[str, int]]:
    """A pair (stage, most bytes on the device during the operation) for each operation of the computing queue."""
    return ((op.stage, peak) for op, peak, _ in _Walk(program, chain).run())


def gpu_peak_bytes(program: Program, chain: Chain) -> int:
    """The most bytes on the device at any time of a step of `program`, or during work between two steps."""
    walk = _Walk(program, chain)
    return max(walk.between().total_bytes, *(peak for _, peak, _ in walk.run()))


def between_bytes(program: Program, chain: Chain) -> int:
    """The bytes on the device during work between two steps; 0 where there is no such work."""
    return _Walk(program, chain).between().total_bytes if chain.between_gpu_bytes else 0


def gpu_breakdown(program: Program, chain: Chain) -> Iterator[Breakdown]:
    """The bytes on the device at each operation of the computing queue, divided by what they are for."""
    walk = _Walk(program, chain)
    before = walk.parts()
    for op, peak_bytes, after_bytes in walk.run():
        usage = Usage(op=op, peak_bytes=peak_bytes, after_bytes=after_bytes)
        after = walk.parts()
        standing = before if usage.op.kind is OpKind.FREE else after
        if usage.op.kind is OpKind.RUN:
            standing = replace(before, waiting_bytes=walk.others)
        peak = replace(standing, running_bytes=usage.peak_bytes - standing.total_bytes)
        yield Breakdown(usage=usage, peak=peak, after=after)
        before = after


def parts_at_peak(program: Program, chain: Chain) -> Breakdown:
    """What the device holds at the peak of a step: at the first operation with the most bytes on the device. If work
    between two steps needs more, that counts to the step's first operation."""
    most = max(gpu_breakdown(program, chain), key=lambda breakdown: breakdown.usage.peak_bytes)
    between = _Walk(program, chain).between()
    if between.total_bytes <= most.usage.peak_bytes:
        return most
    usage = Usage(op=program.ops[0], peak_bytes=between.total_bytes, after_bytes=between.total_bytes)
    return Breakdown(usage=usage, peak=between, after=between)


_ROWS, _SAVED = "rows", "saved"  # keys beside the items: rows of tied gradients, activations saved for backward


class _Walk:
    def __init__(self, program: Program, chain: Chain) -> None:
        self.chain, self.program = chain, program
        self.tensors: dict[str, Tensor] = {t.name: t for t in chain.tensors()}
        self.options = [block.option(name) for block, name in zip(chain.blocks, program.options, strict=True)]
        self.users = chain.users()
        self.rows = [tied_rows(chain, program.slices, program.rounds, begun=begun) for begun in (False, True)]
        self.held = [self._held_bytes(*stage) for stage in stage_order(len(chain.blocks))] + [LOSS_BYTES]
        self.items: dict[str, int] = {}
        self.now = 0
        self.by_sort = dict.fromkeys((WEIGHT, GRADIENT, _ROWS, STATES, _SAVED, ACTIVATIONS), 0)
        for item in program.resident:
            self._add(item, self.tensors[item.name].item_bytes(item.kind), item.kind)
        self.frame = lasting_bytes(chain, program.slices, program.rounds)
        self.frame_names = frozenset(t.name for t in chain.frame_tensors)
        self.others = self.waiting = 0  # bytes held by slices between blocks: while the last block ran, and after it

    def parts(self) -> Parts:
        """The bytes on the device now, by what they are for."""
        sort = self.by_sort
        return Parts(
            frame_bytes=self.frame,
            weights_bytes=sort[WEIGHT],
            gradients_bytes=sort[GRADIENT] + sort[_ROWS],
            states_bytes=sort[STATES],
            saved_bytes=sort[_SAVED],
            offloaded_bytes=sort[ACTIVATIONS],
            waiting_bytes=self.waiting,
        )

    def _held_bytes(self, direction: Direction, index: int) -> int:
        block = self.chain.blocks[index]
        return block.backward_held_bytes if direction is Direction.BACKWARD else block.forward_held_bytes

    def run(self) -> Iterator[tuple[Op, int, int]]:
        """Each operation of the computing queue, the most bytes during it, and the bytes after it."""
        slices, done = self.program.slices, 0
        stages = len(self.held) - 1
        for op in self.program.ops:
            if op.queue is not Queue.COMPUTE:
                continue
            peak = change = 0  # `change`: of the frame's bytes
            match op.kind:
                case OpKind.ALLOC:
                    self._add(op.subject, op.bytes, op.item.kind)
                case OpKind.FREE:
                    peak = self.now
                    self._drop(op.subject, op.item.kind)
                case OpKind.RUN:
                    # Slices run a stage in order: those before this one wait for the next stage, those after for this.
                    stage, k = divmod(done % (stages * slices), slices)
                    self.others = k * self.held[stage + 1] + (slices - 1 - k) * (self.held[stage] if stage else 0)
                    self.others += op.round * slices * LOSS_BYTES
                    done += 1
                    self.waiting = self.others + self.held[stage + 1]
                    peak = self._run(op, stage) + self.others - self.waiting
                    change = self._frame_gradients(op)
                case OpKind.NORM:
                    change = NORM_BYTES * len(op.names)
                case OpKind.UPDATE:
                    peak = self.now + op.bytes
                    if not self.frame_names.isdisjoint(op.names):
                        change = -sum(block.frame_gradient_bytes for block in self.chain.blocks)
            peak += self.frame + self.waiting
            self.frame += change
            after = self.now + self.frame + self.waiting
            yield op, max(peak, after), after

    def between(self) -> Parts:
        """The bytes on the device during work between two steps, for which what has a place on the host leaves; none
        where there is no such work."""
        if not self.chain.between_gpu_bytes:
            return Parts()
        leaving = {op.item for op in self.program.ops if op.kind is OpKind.FETCH}
        kept = dict.fromkeys((WEIGHT, STATES), 0)
        for item in self.program.resident:
            if item not in leaving:
                kept[item.kind] += self.tensors[item.name].item_bytes(item.kind)
        return Parts(
            frame_bytes=lasting_bytes(self.chain, self.program.slices, self.program.rounds),
            weights_bytes=kept[WEIGHT],
            states_bytes=kept[STATES],
            running_bytes=self.chain.between_gpu_bytes,
        )

    def _run(self, op: Op, stage: int) -> int:
        """The peak, in bytes, of running a block on a slice, without what waiting slices hold. Records what the run
        allocates and what it releases."""
        direction, index, k = op.turn
        block, option = self.chain.blocks[index], self.options[index]
        peak = self.now + self.chain.start_bytes if stage == 0 else 0
        if direction is Direction.FORWARD:
            peak = max(peak, self.now + block.forward_held_bytes + option.forward_peak_bytes)
            saved = option.saved_bytes + (block.input_bytes if option.reads_input else 0)
            self._add(f"saved:{index}.{k}", saved, _SAVED)
            if option.offloaded_bytes:
                self._add(Item.activations(index, k), option.offloaded_bytes, ACTIVATIONS)
            after = block.forward_frame_bytes
        elif direction is Direction.HEAD:
            before = self.now
            peak = max(peak, before + option.forward_peak_bytes + self._gradients(op))
            after = block.forward_frame_bytes
        else:
            held = self.now + block.backward_held_bytes
            new = [t for t in block.tensors if t.trainable and Item.gradient(t.name) not in self.items]
            needed = self._first_peak(option, new) if new else option.backward_peak_bytes
            peak = max(peak, held + needed + self._gradients(op))
            self._drop(f"saved:{index}.{k}", _SAVED)
            self._drop(Item.activations(index, k), ACTIVATIONS)
            after = block.backward_frame_bytes
        return max(peak, self.now + after)

    def _frame_gradients(self, op: Op) -> int:
        """Bytes of the gradient sums of the frame (the model outside its blocks) that exist after this run of a block
        on a slice and did not before. During the run they count to what the slice holds."""
        direction, index, k = op.turn
        return 0 if op.round or k or direction is Direction.FORWARD else self.chain.blocks[index].frame_gradient_bytes

    @staticmethod
    def _first_peak(option: Option, new: list[Tensor]) -> int:
        sums = sum(t.gradient_bytes for t in new)
        first = option.backward_first_peak_bytes
        return option.backward_peak_bytes + sums if first is None else first

    def _gradients(self, op: Op) -> int:
        """Records the gradients that a block's backward on one slice makes; returns the bytes it needs in addition
        while it makes them."""
        _, index, k = op.turn
        transient = 0
        for tensor in self.chain.blocks[index].tensors:
            if not tensor.trainable:
                continue
            self._add(Item.gradient(tensor.name), tensor.gradient_bytes, GRADIENT)
            rows = self.rows[op.round > 0].get(tensor.name)
            if rows is None:
                continue
            # Each slice's gradient rows of the head wait for those of the embedding, to be added in plain order.
            item = f"rows:{tensor.name}.{k}"
            if index == self.users[tensor.name][0]:
                transient += rows.taking_bytes(k)
                self._drop(item, _ROWS)
            elif item not in self.items:
                self._add(item, rows.aside_bytes(k), _ROWS)
                transient += rows.aside_bytes(k) + rows.masking_bytes(k)
        return transient

    def _add(self, item: str, size: int, sort: str) -> None:
        if item not in self.items:
            self.items[item] = size
            self.now += size
            self.by_sort[sort] += size

    def _drop(self, item: str, sort: str) -> None:
        size = self.items.pop(item, 0)
        self.now -= size
        self.by_sort[sort] -= size


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """Bytes on the host under a plan, by what they are for: thesis (4.18), with gradients added. All of them are taken
    during the whole run.

    weights_bytes      working copies of weights that ever leave the device or that the CPU updates
    states_bytes       optimizer states that ever leave the device or that the CPU updates, except those on disk; less
                       what packing saves (`Chain.packed_bytes`)
    gradients_bytes    gradients of tensors that the CPU updates, and others that leave between rounds, except those
                       that overwrite the working copy
    offloaded_bytes    activations of a round's slices (micro-batches), except those that go on to a disk
    ring_bytes         slots through which weights come from disk, and gradients go to disk and come back
    state_ring_bytes   slots through which optimizer states come from disk and go back
    activation_ring_bytes    slots through which activations go to disk and come back
    kept_bytes         the old weights and states, kept by updates that run before the gradient norm is known
    products_bytes     scratch of the CPU update that needs most (`Tensor.host_scratch_bytes`)
    between_bytes      what work between two steps takes (`Chain.between_bytes`)
    """

    weights_bytes: int = 0
    states_bytes: int = 0
    gradients_bytes: int = 0
    offloaded_bytes: int = 0
    kept_bytes: int = 0
    ring_bytes: int = 0
    state_ring_bytes: int = 0
    activation_ring_bytes: int = 0
    products_bytes: int = 0
    between_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of all parts, in bytes."""
        return sum(getattr(self, field.name) for field in fields(self))


def cpu_parts(plan: Plan, chain: Chain) -> HostParts:
    """The bytes on the host under a plan, by what they are for."""
    updated, ahead = plan.cpu_updated(), plan.ahead()
    again = ahead | plan.trailing()  # tensors whose gradient is read a second time
    moved = {item for stage in plan.stages for item in (*stage.prefetch, *stage.offload)}
    weights, states, gradients = (
        {item.name for item in moved if item.kind == kind} for kind in (WEIGHT, STATES, GRADIENT)
    )
    held = updated | gradients if plan.rounds > 1 else updated
    packed = {
        t.name: chain.packed_bytes(t, plan.rounds, ahead=t.name in ahead) for t in chain.tensors() if t.name in updated
    }
    options = [block.option(name) for block, name in zip(chain.blocks, plan.options, strict=True)]
    return HostParts(
        weights_bytes=sum(
            t.bytes for t in chain.tensors() if not t.on_disk and (t.name in updated or t.name in weights)
        ),
        states_bytes=sum(
            t.state_bytes - packed.get(t.name, 0)
            for t in chain.tensors()
            if (t.name in updated and not t.states_on_disk) or t.name in states
        ),
        gradients_bytes=sum(
            t.gradient_bytes if t.name in again else t.host_gradient_bytes(plan.rounds)
            for t in chain.tensors()
            if t.name in held
        ),
        offloaded_bytes=plan.slices * sum(option.offloaded_bytes for option in options if not option.on_disk),
        kept_bytes=sum(t.master_bytes for t in chain.tensors() if t.name in ahead),
        ring_bytes=ring_bytes(chain),
        state_ring_bytes=state_ring_bytes(chain),
        activation_ring_bytes=ACTIVATION_SLOTS * max(map(activation_slot_bytes, options)),
        products_bytes=products_bytes(chain, updated),
        between_bytes=chain.between_cpu_bytes,
    )


def slot_bytes(chain: Chain) -> int:
    """Bytes of one slot of host memory into which any weight on disk fits, wherever it begins in a file; 0 if no weight
    is on disk."""
    return max((whole_pages(t.bytes) + PAGE for t in chain.tensors() if t.on_disk), default=0)


def gradient_slot_bytes(chain: Chain) -> int:
    """Bytes of one slot of host memory into which any gradient fits, of the tensors that have weight, gradient and
    states on disk; 0 if there are none."""
    return max((whole_pages(t.bytes) for t in chain.tensors() if t.wholly_on_disk), default=0)


def ring_bytes(chain: Chain) -> int:
    """Bytes of host memory for all slots through which weights and gradients come from disk and go there."""
    return SLOTS * slot_bytes(chain) + GRADIENT_SLOTS * gradient_slot_bytes(chain)


def state_slot_bytes(chain: Chain) -> int:
    """Bytes of one slot of host memory into which any piece of optimizer states on disk fits; 0 if no states are on
    disk."""
    return max((chain.state_pieces(t)[0].bytes for t in chain.tensors() if t.states_on_disk), default=0)


def state_ring_bytes(chain: Chain) -> int:
    """Bytes of host memory for all slots through which pieces of optimizer states come from disk and go back."""
    return STATE_SLOTS * state_slot_bytes(chain)


def activation_slot_bytes(option: Option) -> int:
    """Bytes of one slot of host memory for the activations of one block and one slice under this option, with gaps
    between tensors; 0 if they do not go to disk."""
    return option.stored_bytes + _BETWEEN if option.on_disk else 0


def products_bytes(chain: Chain, updated: Collection[str] | None = None) -> int:
    """The most bytes of scratch that a CPU update needs among the tensors named in `updated` (None: among all). The
    updates run one after another and share this memory."""
    named = (t for t in chain.tensors() if updated is None or t.name in updated)
    return max((t.host_scratch_bytes for t in named), default=0)


def cpu_peak_bytes(plan: Plan, chain: Chain) -> int:
    """The total bytes on the host under a plan."""
    return cpu_parts(plan, chain).total_bytes
