"""Moves a model's weights and optimizer states out of its modules to the places that the plan has for them on host and
device; saves, loads and returns them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from planner.optimizers.base import Optimizer
from planner.optimizers.table import ADAMW
from planner.schedule.chain import Chain
from planner.schedule.compile import OpKind, Program, Queue, overwritten, packed
from planner.schedule.items import GRADIENT, STATES, WEIGHT, Item
from planner.schedule.memory_use import activation_slot_bytes, gradient_slot_bytes
from planner.schedule.memory_use import slot_bytes as weight_slot_bytes
from planner.schedule.operations import gradient_slots_of
from planner.schedule.state_pieces import Piece
from worker.engine.device_items import Device
from worker.engine.host_items import Host, new_states
from worker.engine.stored_activations import StoredActivations
from worker.engine.stored_states import Scratch, Store, StoredStates
from worker.engine.stored_weights import StoredWeights
from worker.runtime.arena import Memory
from worker.runtime.machine import Machine


class Weights:
    """The weights of a model that an engine has taken over: each has a copy (on the device, on the host, on disk) where
    the program needs one, and nowhere else.

    frame      parameters outside the blocks, which stay on the device together with their gradients and states
    trained    names of the trainable parameters, as `named_parameters()` orders them
    left_out   weight -> number of steps in which no gradient reached it: AdamW does not count these steps for it
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        chain: Chain,
        machine: Machine,
        memory: Memory,
        store: Store | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """`store` keeps the optimizer states that are on disk, `scratch` everything else that passes through disk."""
        self.stored = None if store is None else StoredStates(store, machine)
        on_disk = {op.item.name for op in program.queue(Queue.DISK_WRITE) if op.piece is not None}
        in_store = {piece.name for piece in store.pieces} if store is not None else set()
        if on_disk != in_store:
            raise ValueError(f"the plan's states on disk are not those of the store: {sorted(on_disk ^ in_store)[:3]}")
        self._begun = store is None or store.resumed
        options = [block.option(name) for block, name in zip(chain.blocks, program.options, strict=True)]
        slot_bytes = max(map(activation_slot_bytes, options))
        self.host = Host(
            machine,
            StoredWeights(scratch, machine, gradient_slots_of(chain), gradient_slot_bytes(chain)),
            StoredActivations(scratch, machine, slot_bytes) if slot_bytes else None,
        )
        self.device = Device(self.host, machine.device)
        self.left_out: dict[str, int] = {}
        self._machine, self._memory, self._model = machine, memory, model
        self._parameters = dict(model.named_parameters())
        still = {t.name for t in chain.tensors() if not t.trainable}
        self._still = [p for name, p in self._parameters.items() if name in still and p.requires_grad]
        for parameter in self._still:  # no gradient reaches it
            parameter.requires_grad_(False)
        self.trained = tuple(name for name, p in self._parameters.items() if p.requires_grad)
        in_blocks = {t.name for t in chain.tensors()}
        if missing := in_blocks - self._parameters.keys():
            raise ValueError(f"the chain has a tensor that the model has not: {min(missing)}")
        self.frame = {name: p for name, p in self._parameters.items() if name not in in_blocks}
        self._on_host = frozenset(_host_items(program))
        self._overwritten = overwritten(chain, program.ops)
        self._on_disk = {t.name: t.trainable for t in chain.tensors() if t.on_disk}
        self._slot_bytes = weight_slot_bytes(chain)
        self._packed = packed(chain, program.ops)
        every = (*chain.tensors(), *chain.frame_tensors)
        self._optimizers: dict[str, Optimizer] = {t.name: t.optimizer for t in every}
        self._resident = frozenset(program.resident) | set(_frame_items(self.frame))
        try:
            for name, parameter in self._parameters.items():
                self._take(name, parameter)
            memory.expect(())
            self._move_buffers(lambda buffer: machine.place(buffer))
            for optimizer in dict.fromkeys(self._optimizers.values()):
                self.device.constants = self.device.constants or optimizer.constants(machine.place)
        except BaseException:  # memory may have run out
            self.give_back()
            raise

    def _move_buffers(self, move: Callable[[Tensor], Tensor]) -> None:
        moved: dict[int, Tensor] = {}  # modules may share one
        for name, buffer in list(self._model.named_buffers(remove_duplicate=False)):
            module, _, local = name.rpartition(".")
            if id(buffer) not in moved:
                moved[id(buffer)] = move(buffer)
            setattr(self._model.get_submodule(module), local, moved[id(buffer)])

    @torch.no_grad()
    def _take(self, name: str, parameter: nn.Parameter) -> None:
        """Make the tensor's items from the parameter. The parameter becomes one expanded element, or, for a frame's
        tensor, the device's copy."""
        weight, machine = parameter.detach().contiguous(), self._machine
        kinds = [kind for kind in (WEIGHT, GRADIENT, STATES) if Item.of(kind, name) in self._on_host]
        if kinds and name in self._on_disk:
            to_disk = self.host.move_to_disk if self._on_disk[name] else self.host.leave_on_disk
            to_disk(name, weight, self._slot_bytes)
            if Item.weight(name) in self._resident:
                weight = weight.clone()  # the device's copy may be freed, the mapped memory stays
        elif kinds:
            self.host.hold(
                name,
                kinds,
                weight,
                overwritten=name in self._overwritten,
                packed=name in self._packed,
                optimizer=self._optimizers.get(name, ADAMW),
            )
        if Item.weight(name) in self._resident:
            self._place(Item.weight(name), [weight])
        if Item.states(name) in self._resident:
            self._place(Item.states(name), new_states(weight, self._optimizers.get(name, ADAMW)))
        if name in self.frame:
            parameter.data = self.device.items[Item.weight(name)][0]
        else:
            parameter.data = _without_content(weight, machine.device)

    def _place(self, item: Item, tensors: Sequence[Tensor]) -> None:
        self._memory.expect_item(item)
        self.device.items[item] = [self._machine.place(tensor) for tensor in tensors]

    def check_closed(self) -> None:
        """Assert that, after a step, the weights, gradients and states on the device are exactly those that were there
        before it."""
        assert self.device.items.keys() == self._resident, self.device.items.keys() ^ self._resident

    def drop_transient(self) -> None:
        """Free on the device, after an error, whatever the plan does not keep there between steps, or whose content has
        not arrived."""
        self.device.free(*(self.device.items.keys() - self._resident | self.device.empty))

    @torch.no_grad()
    def leave(self, items: Iterable[Item]) -> None:
        """Send `items` (weights, states) from the device to the host, and free their device memory. Weights that can be
        read from disk are only freed. Between steps only."""
        for item in items:
            if not (self.host.is_mapped(item) or self.host.is_wholly_on_disk(item.name)):
                self.device.send(item)
            self.device.free(item)

    @torch.no_grad()
    def come_back(self) -> None:
        """Restore the state between steps on the device: fetch the weights and states that the plan keeps there, and
        free all others."""
        self.drop_transient()
        for item in self._resident - self.device.items.keys():
            self._memory.expect_item(item)
            self.device.allocate(item)
            self.device.fetch(item)
        self._memory.expect(())

    @torch.no_grad()
    def take_back(self) -> None:
        """Repair the weights after an error in a step: round working copies that gradients have overwritten from their
        masters again, and fetch what the plan keeps on the device between steps."""
        for name in self._overwritten:
            if self.stored is not None and name in self.stored:
                self.stored.make_anew(name, self.host.items[Item.weight(name)][0])
            elif Item.gradient(name) in self.host.items:
                self.host.items[Item.weight(name)][0].copy_(self.host.items[Item.states(name)][-1])
        self.come_back()

    def state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (name, tensors by state) of every trained tensor, in host memory: the fp32 "master", the moments under
        the names that `Optimizer.named` gives them (AdamW: "exp_avg" and "exp_avg_sq", fp32), and "left_out", the
        number of steps that the tensor was left out of, if any. Tensors on the device are copied one at a time. Those
        on the host are the engine's own: use or copy each before asking for the next."""
        for name in self.trained:
            yield from self._state_of(name)

    def _state_of(self, name: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The entry of one tensor in `state`."""
        with self._whole(name) as states:
            parts = {part: t.cpu() for part, t in self._parts(name, states).items()}
            if "master" not in parts:
                parts["master"] = self._current(Item.weight(name))[0].detach().cpu()
            if name in self.left_out:
                parts["left_out"] = torch.tensor(float(self.left_out[name]))
            yield name, parts

    def state_to_save(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensors by state) as `state` does, in the form in which a checkpoint stores them. For a tensor
        whose optimizer states are on disk, this is an object to copy them from or, where a checkpoint names these
        states in place of copying them, only what is not on disk."""
        for name in self.trained:
            if self.stored is None or name not in self.stored:
                yield from self._state_of(name)
            elif self.stored.store.homes == 1:
                yield name, self.stored.streamed(name, self._beside_disk(name))
            elif beside := self._beside_disk(name):
                yield name, beside

    def masters(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (name, {"master": fp32 weight}) of every trained tensor. For a master on disk the working copy is
        given, which is the master rounded to the working dtype."""
        for name in self.trained:
            if self.stored is not None and name in self.stored:
                yield name, {"master": self._current(Item.weight(name))[0].detach().cpu()}
            else:
                yield from ((name, {"master": parts["master"]}) for _, parts in self._state_of(name))

    def written(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Any]]:
        """Yield (name, {"weight": tensor}) of each tensor in `dtypes` (name -> dtype), rounded once to that dtype. A
        trained tensor is rounded from its fp32 master, since its working copy is rounded already. For a master on disk,
        an object to read it piece by piece takes the tensor's place."""
        for name, dtype in dtypes.items():
            work = self._parameters[name].dtype
            if name not in self.trained or dtype == work or work == torch.float32:
                yield name, {"weight": self._current(Item.weight(name))[0].detach().cpu().to(dtype)}
            elif self.stored is not None and name in self.stored:
                yield name, self.stored.written(name, dtype)
            else:
                yield from ((name, {"weight": parts["master"].to(dtype)}) for _, parts in self._state_of(name))

    def _beside_disk(self, name: str) -> dict[str, Tensor]:
        """The parts of a tensor that are not on disk although its optimizer states are."""
        parts: dict[str, Tensor] = {}
        if self._parameters[name].dtype == torch.float32:
            parts["master"] = self._current(Item.weight(name))[0].detach().cpu()
        if name in self.left_out:
            parts["left_out"] = torch.tensor(float(self.left_out[name]))
        return parts

    @torch.no_grad()
    def begin(self) -> None:
        """Write the states before the first step to disk, for the tensors whose states are there, unless states were
        loaded or the states on disk are those of a checkpoint. Raises UserError "disk-failed"."""
        if not self._begun and self.stored is not None:
            for name in self.trained:
                if name in self.stored:
                    self.stored.begin(name, self._current(Item.weight(name))[0])
        self._begun = True

    def _whole(self, name: str) -> AbstractContextManager[list[Tensor]]:
        """A context with the up-to-date optimizer states of one tensor, unpacked."""
        if self.stored is not None and name in self.stored:
            return nullcontext(self.stored.whole(name, self._parameters[name]))
        if Item.states(name) in self._resident:
            return nullcontext(self.device.items[Item.states(name)])
        return self.host.whole_states(name)

    def frozen(self, names: Collection[str] | None = None) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (name, {"master": weight}) of every tensor that is not trained, in host memory; with `names`, only of
        these."""
        frozen = (name for name, parameter in self._parameters.items() if not parameter.requires_grad)
        for name in frozen if names is None else names:
            yield name, {"master": self._current(Item.weight(name))[0].detach().cpu()}

    def _current(self, item: Item) -> list[Tensor]:
        """The copy that is up to date when no step runs: for a resident item the device's, since the step has fetched
        again what the CPU updated."""
        return self.device.items[item] if item in self._resident else self.host.copies(item)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Mapping[str, Tensor]]]) -> None:
        """Replace all weights and states by `tensors`, which `state` gave. If the states on disk are already those of
        the checkpoint, only the rest is replaced. Raises ValueError when a tensor is missing, unknown or of another
        shape, and UserError when the disk fails or its states are torn."""
        self.come_back()  # brings back what an error has dropped
        missing = set(self.trained)
        stored, written = self.stored, False
        self.left_out.clear()
        for name, parts in tensors:
            if name not in missing:
                raise ValueError(f"{name} is no trained parameter of this model, or comes twice")
            missing.discard(name)
            if "left_out" in parts:
                self.left_out[name] = int(parts["left_out"])
            written |= self._put(name, parts)
        if stored is not None and stored.resumed and not written:
            missing -= {name for name in self.trained if name in stored}
            for piece, master in stored.masters_taken_over():
                self._take_over(piece, master)
            for name in (name for name in self.trained if name in stored):
                for copy in self.device.items.get(Item.weight(name), ()):  # a step fetches it only after its update
                    copy.copy_(self.host.copies(Item.weight(name))[0])
        self._begun = True
        if missing:
            raise ValueError(f"nothing was given for {min(missing)}")

    @torch.no_grad()
    def replace(self, tensors: Iterable[tuple[str, Mapping[str, Tensor]]]) -> None:
        """Replace the weights and states of some tensors by `tensors`, in the form of `state` or `frozen`, with moments
        in fp32. Between steps only. Raises ValueError for a tensor that the model has not, or whose place cannot be
        written."""
        for name, parts in tensors:
            if name not in self._parameters or self.host.is_mapped(Item.weight(name)):
                raise ValueError(f"{name} is no parameter of this model, or its place is the model's own file")
            self._put(name, self._optimizers.get(name, ADAMW).from_fp32(parts))

    def _put(self, name: str, parts: Mapping[str, Tensor]) -> bool:
        """Replace the weight and states of one tensor. Returns whether states on disk were written."""
        stored = self.stored if "exp_avg" in parts and self.stored is not None and name in self.stored else None
        if stored is not None:
            stored.load(name, parts)
        for copies in (self.host.items, self.device.items):
            for target in copies.get(Item.weight(name), ()) if "master" in parts else ():
                self._copy(name, target, parts["master"])
            if not self.host.is_packed(name):
                self._copy_parts(name, copies.get(Item.states(name), ()), parts)
        if self.host.is_wholly_on_disk(name) and "master" in parts:
            self.host.weights.put(name, parts["master"])
        if self.host.is_packed(name):
            with self.host.whole_states(name) as states:
                self._copy_parts(name, states, parts)
        return stored is not None

    def _take_over(self, piece: Piece, master: Tensor) -> None:
        """Round a piece of a master into its part of the working copy."""
        wholly = self.host.is_wholly_on_disk(piece.name)
        work = self.host.weights.own(piece.name) if wholly else self.host.items[Item.weight(piece.name)][0]
        last = piece.first + piece.elements
        work.view(-1)[piece.first : last] = master
        if wholly and last == work.numel():
            self.host.weights.keep(piece.name)

    def _copy_parts(self, name: str, states: Sequence[Tensor], parts: Mapping[str, Tensor]) -> None:
        for part, target in self._parts(name, states).items():
            if (source := parts.get(part)) is None or source.dtype != target.dtype:
                raise ValueError(f"{part} of {name} is not there, or not in {target.dtype}")
            self._copy(name, target, source)

    def _parts(self, name: str, states: Sequence[Tensor]) -> dict[str, Tensor]:
        optimizer = self._optimizers.get(name, ADAMW)
        moments, master = states[: len(optimizer.moments)], states[len(optimizer.moments) :]
        parts = optimizer.named(moments, self._parameters[name].shape) if states else {}
        return parts | dict(zip(("master",), master, strict=False))

    @staticmethod
    def _copy(name: str, target: Tensor, source: Tensor) -> None:
        if source.shape != target.shape:
            raise ValueError(f"{name} has shape {tuple(target.shape)}, given was {tuple(source.shape)}")
        target.copy_(source)

    def give_back(self) -> None:
        """Put the trained weights back into the model's parameters, in host memory, and free everything else."""
        for name, parameter in self._parameters.items():
            copies = self.device.items if (item := Item.weight(name)) in self._resident else self.host.items
            if item in copies:  # else the parameter still has its weight
                weight = self._current(item)[0].detach()
                mapped = copies is self.host.items and self.host.is_mapped(item)
                parameter.data = weight if mapped else weight.to("cpu", copy=True)
            for items in (self.host.items, self.device.items):
                for kind in (WEIGHT, GRADIENT, STATES):
                    items.pop(Item.of(kind, name), None)
        for parameter in self._still:
            parameter.requires_grad_()
        self._clear()

    @torch.no_grad()
    def let_go(self) -> None:
        """Free all memory, that of the weights included: the model's parameters become tensors with their shapes but no
        content."""
        for parameter in self._parameters.values():
            parameter.data = _without_content(parameter, torch.device("cpu"))
        self._clear()

    def _clear(self) -> None:
        """Free the gradients and all items, and move the model's buffers to the host."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._move_buffers(Tensor.cpu)
        self.host.clear()
        self.device.items.clear()
        self.device.constants = None


def _without_content(weight: Tensor, device: torch.device) -> Tensor:
    """A stand-in for a block's weight, since frames read its shape, dtype and device. Its value would be wrong: NaN
    makes a use of it show."""
    value = math.nan if weight.is_floating_point() else 0
    return torch.full((), value, dtype=weight.dtype, device=device).expand(weight.shape)


def _frame_items(frame: Mapping[str, nn.Parameter]) -> Iterator[Item]:
    """The frame's items, which are on the device all the time."""
    for name, parameter in frame.items():
        yield Item.weight(name)
        if parameter.requires_grad:
            yield Item.states(name)


def _host_items(program: Program) -> Iterator[Item]:
    """Items that copies or CPU updates touch in host memory."""
    for op in program.ops:
        if op.kind in (OpKind.FETCH, OpKind.SEND):
            yield op.item
        elif op.queue is Queue.CPU:
            for name in op.names:
                yield Item.weight(name)
                if op.piece is None:
                    yield Item.states(name)
