"""Does the work of each kind of operation in a program: allocations, copies, updates, reads and writes on disk. An
interpreter decides on which thread or stream, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from planner.cpu.adamw import Target as AdamWTarget
from planner.graph import label
from planner.optimizers.base import Group, Target
from planner.schedule.compile import Op, OpKind
from planner.schedule.items import ACTIVATIONS, GRADIENT, WEIGHT, Item
from worker.engine.device_items import Device
from worker.engine.gradients import Gradients
from worker.engine.host_items import Host
from worker.engine.stored_states import StoredStates
from worker.runtime.interpreter import Together, name_of
from worker.runtime.step_values import StepValues


class Actions:
    """Does the work of every kind of operation in a program except RUN, the computation of a block."""

    def __init__(
        self,
        host: Host,
        device: Device,
        gradients: Gradients,
        frame: Mapping[str, nn.Parameter],
        left_out: dict[str, int],
        states: StoredStates | None = None,
    ) -> None:
        """`left_out`: weight -> number of steps in which it was not updated because no gradient reached it. `states`:
        the optimizer states on disk."""
        self._host, self._device, self._gradients, self._frame = host, device, gradients, frame
        self._left_out, self._stored = left_out, states
        self._clipped = False  # whether the last norm clipped the gradients
        self._ahead: set[str] = set()  # weights updated in this step before its norm is known

    def perform(self, ops: Together, values: StepValues) -> None:
        """Do `ops`, operations that are issued as one, or launch them on the current CUDA stream. A profile shows them
        under their name. `values`: what updates of this step read. The caller has switched autograd off."""
        with label(name_of(ops)):
            self._do(ops, values)

    def only_copies(self, op: Op) -> bool:
        """Whether `op`, when done now, only copies between the device and host memory that the device can access
        directly."""
        if op.kind not in (OpKind.FETCH, OpKind.SEND) or op.slot is not None:  # disk operations use the slot, too
            return False
        if op.item.kind == ACTIVATIONS:
            its = self._device.items.get(op.item)  # None if the operation is left out
            return op.kind is OpKind.FETCH or its is None or self._host.is_parked(op.item, its)
        return not (self._host.is_mapped(op.item) or self._host.is_wholly_on_disk(op.item.name))

    def _do(self, ops: Together, values: StepValues) -> None:
        op = ops[0]
        match op.kind:
            case OpKind.ALLOC:
                self._device.allocate(*[each.item for each in ops])
            case OpKind.FREE:
                self._device.free(*[each.item for each in ops])
            case OpKind.FETCH:
                if op.slot is None:
                    self._device.fetch(*[each.item for each in ops])
                else:
                    self._device.fetch_from(op.slot, op.item)
            case OpKind.READ | OpKind.WRITE if op.item.kind == ACTIVATIONS:
                assert op.slot is not None
                act = self._host.stored.read if op.kind is OpKind.READ else self._host.stored.write
                act(op.item, op.slot)
            case OpKind.READ | OpKind.WRITE if op.passes_whole:
                assert op.slot is not None
                weights = self._host.weights
                (weights.read if op.kind is OpKind.READ else weights.write)(op.item, op.slot)
            case OpKind.READ | OpKind.PEEK:
                assert op.slot is not None
                if op.piece is None:
                    self._host.read(op.item, op.slot)
                else:
                    self._states.read(op.item.name, op.piece, op.slot)
            case OpKind.WRITE:
                assert op.slot is not None and op.piece is not None
                self._states.write(op.item.name, op.piece, op.slot)
            case OpKind.CPU_UPDATE | OpKind.CPU_WEIGHT if op.piece is not None:
                self._update_piece(op, values)
            case OpKind.CPU_STATES:
                self._update_states(op, values)
            case OpKind.SEND:
                if op.slot is None:
                    self._device.send(*[each.item for each in ops])
                else:
                    self._device.send_to(op.slot, op.item)
            case OpKind.NORM:
                self._gradients.norm(op.names)
            case OpKind.CLIP:
                self._gradients.clip(values)
            case OpKind.UPDATE:
                self._update(op.names, values)
            case OpKind.CPU_UPDATE:
                self._update_on_cpu(op.names, values)
            case OpKind.CPU_AHEAD:
                self._update_ahead(op.names, values)
            case OpKind.CPU_REPLAY:
                self._replay(op.names, values)
            case OpKind.RUN:
                raise AssertionError(f"{op.name}: turns are run by the engine")

    def _update(self, names: Sequence[str], values: StepValues) -> None:
        targets: list[Target] = []
        for name in names:
            gradient = self._gradients.of(name)
            if gradient is not None:
                targets.append(self._target(name, self._device.items, gradient, values))
            else:
                self._leave_out(name)
        self._apply(targets, values, values.device_count, values.coefficient)
        for name in names:
            if name in self._frame:
                self._frame[name].grad = None

    def _update_on_cpu(self, names: Sequence[str], values: StepValues) -> None:
        items, targets = self._host.items, []
        for name in names:
            target = self._target(name, items, items[Item.gradient(name)][0], values)
            if name in values.reached:
                targets.append(target)
            else:
                self._leave_out(name)
                if target.work is not target.master and not self._host.is_packed(name):
                    target.work.copy_(target.master)  # the gradient may have overwritten it
        self._apply(targets, values, values.host_count, values.coefficient_on_host())

    @property
    def _states(self) -> StoredStates:
        assert self._stored is not None
        return self._stored

    def _update_piece(self, op: Op, values: StepValues) -> None:
        """Update a piece of a tensor whose states are in a slot: weight and states, or the weight alone (CPU_WEIGHT,
        after which the slot's states are forgotten)."""
        target = self._piece_target(op, values)
        (name,) = op.names
        if name in values.reached:
            self._apply([target], values, values.host_count, values.coefficient_on_host())
            return
        if op.piece == 0:
            self._leave_out(name)
        if target.work is not target.master:
            target.work.copy_(target.master)

    def _update_states(self, op: Op, values: StepValues) -> None:
        """Repeat, for the states, the update that the step before did for the weight. The weight itself must stay, so
        the weight made here overwrites the gradient."""
        target = self._piece_target(op, values)
        if op.names[0] in values.reached:
            target = replace(target, work=target.gradient)
            self._apply([target], values, values.host_count, values.coefficient_on_host())

    def _piece_target(self, op: Op, values: StepValues) -> AdamWTarget:
        assert op.slot is not None and op.piece is not None
        (name,) = op.names
        piece, states = self._states.in_slot(name, op.piece, op.slot)
        span = slice(piece.first, piece.first + piece.elements)
        if self._host.is_wholly_on_disk(name):
            work = gradient = self._host.weights.own(name).view(-1)[span]
        else:
            work, gradient = (self._host.items[Item.of(kind, name)][0].view(-1)[span] for kind in (WEIGHT, GRADIENT))
        return cast(AdamWTarget, self._group(name, values).target(name, work, states, gradient))

    def _leave_out(self, name: str) -> None:
        """Leave a weight without a gradient out of the step, as plain AdamW does: no decay, and no step counted."""
        self._left_out[name] = self._left_out.get(name, 0) + 1

    def _update_ahead(self, names: Sequence[str], values: StepValues) -> None:
        """Update as if the norm did not clip, into other memory; the values before stay for `_replay`. If the last norm
        clipped, this one is likely to clip as well: then the update is left to `_replay`."""
        self._ahead.difference_update(names)
        if self._clipped:
            return
        names = [name for name in names if name in values.reached]
        values.updating = True
        for name in names:
            self._host.swap(Item.states(name))
            if self._goes_on_from_weight(name):
                self._host.swap(Item.weight(name))
        self._renew(names, values, None)
        self._ahead.update(names)

    def _replay(self, names: Sequence[str], values: StepValues) -> None:
        """Do the updates that have not run ahead. If the norm clips, also repeat those that have; if it does not, the
        coefficient is 1, and a product with 1 would have changed nothing."""
        coefficient = values.coefficient_on_host()
        assert coefficient is not None
        self._clipped = float(coefficient) != 1.0
        if waiting := [name for name in names if name not in self._ahead]:
            self._update_on_cpu(waiting, values)
        if self._clipped and (again := [name for name in names if name in self._ahead]):
            self._renew(again, values, coefficient)

    def _renew(self, names: Sequence[str], values: StepValues, coefficient: Tensor | None) -> None:
        items, targets = self._host.items, []
        for name in names:
            exp_avg, exp_avg_sq, *master = self._host.before(Item.states(name))
            weight = self._host.before(Item.weight(name)) if self._goes_on_from_weight(name) else []
            updated, *others = [*master, *weight]
            target = cast(AdamWTarget, self._target(name, items, items[Item.gradient(name)][0], values))
            targets.append(replace(target, before=(updated, exp_avg, exp_avg_sq, *others)))
        self._apply(targets, values, values.host_count, coefficient)

    def _apply(self, targets: Sequence[Target], values: StepValues, count: Tensor, coefficient: Tensor | None) -> None:
        """One step of the optimizer on the targets, group by group."""
        values.updating = True
        for number, group in enumerate(values.groups):
            of_group = [target for target in targets if group.has(target.name)]
            for less in dict.fromkeys(self._left_out.get(target.name, 0) for target in of_group):
                group.update(
                    [target for target in of_group if self._left_out.get(target.name, 0) == less],
                    learning_rate=values.rate_of(number),
                    count=count - less if less else count,
                    coefficient=coefficient,
                    constants=self._device.constants,
                )

    def _target(
        self, name: str, items: Mapping[Item, Sequence[Tensor]], gradient: Tensor, values: StepValues
    ) -> Target:
        return self._group(name, values).target(name, items[Item.weight(name)][0], items[Item.states(name)], gradient)

    @staticmethod
    def _group(name: str, values: StepValues) -> Group:
        return next(group for group in values.groups if group.has(name))

    def _goes_on_from_weight(self, name: str) -> bool:
        """Whether the weight is its own master, or a part of it (packed states)."""
        return len(self._host.items[Item.states(name)]) == 2 or self._host.is_packed(name)
