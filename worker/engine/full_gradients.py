"""Runs the model forward and backward once between two steps, and revises frozen weights by their full gradients.

All slices (micro-batches) go through the model together, block by block. Weights come to the device block by block and
leave again, so the device holds those of one block, with the sums of its gradients in fp32. The inputs of blocks wait
on the host for their backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from planner.graph import EAGER, RECIPES, BlockCode
from planner.graph.call import Given
from planner.measure.forward_bytes import eval_mode
from planner.models.lsp import requiring_gradients
from planner.out_of_memory import forget_frames
from planner.schedule.items import Item
from planner.schedule.operations import Op, OpKind
from planner.schedule.plan import Direction, Plan
from worker.engine.block_calls import Call, ChunkedCall, ModelBlock
from worker.engine.device_items import Device
from worker.engine.rounds import Rounds
from worker.engine.weights import Weights
from worker.runtime.arena import Memory
from worker.runtime.interpreter import Turn
from worker.runtime.machine import Machine

Revise = Callable[[str, Tensor, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Gets a weight's name, its gradient (fp32) and the weights of its block by name, all on the device. Returns new values
for weights of the block, by name: they are rounded to the weight's dtype."""


class FullGradients:
    """Computes gradients of frozen weights with an engine's model, in evaluation mode. All updates must be finished
    before. Afterwards, also after an error, weights and states are again where they were on the device and the
    host."""

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        blocks: Sequence[ModelBlock],
        weights: Weights,
        machine: Machine,
        memory: Memory,
    ) -> None:
        self._model, self._plan, self._weights = model, plan, weights
        self._machine, self._memory = machine, memory
        self._own_blocks = blocks
        self._blocks: list[ModelBlock] = []  # these and the rounds only while gradients are computed
        self._rounds: _Rounds | None = None

    @property
    def running(self) -> bool:
        """Whether gradients are being computed, so that calls of the blocks' modules must go to `enter`."""
        return self._rounds is not None

    def enter(self, block: ModelBlock, *args: Any, **kwargs: Any) -> Any:
        """Run `block` on these arguments, in place of its module's forward."""
        assert self._rounds is not None
        return self._rounds.enter(self._blocks[block.index], *args, **kwargs)

    def run(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        names: Collection[str],
        revise: Revise,
        states: Callable[[], Iterable[tuple[str, Mapping[str, Tensor]]]],
        model_kwargs: Mapping[str, Any],
    ) -> int | None:
        """Call `revise` for each weight in `names` with its gradient, the sum over all of `batches`, block by block
        from the model's end, and replace the weights that it returns. A weight that no gradient reaches is left out.
        Then replace trained tensors by what `states` gives, as in `Weights.replace`. `model_kwargs`: further arguments
        of the model. Returns the most device bytes in use meanwhile (None when they are not counted)."""
        machine, weights = self._machine, self._weights
        if outside := set(names) - {name for block in self._own_blocks for name in block.weights.values()}:
            raise ValueError(f"{min(outside)} is no weight of a block")
        self._blocks = [_recomputed(block) for block in self._own_blocks]
        sums = _Sums(names)
        turns = _Turns(self._blocks, len(batches), weights, sums, revise)
        self._memory.expect_loose()
        staged = machine.stage_step(batches, 0)
        self._memory.expect(())
        before = machine.random_state()
        machine.reset_peak()
        leaving = [item for item in self._plan.resident if item in weights.host.items]
        with requiring_gradients(self._model, names):
            self._rounds = rounds = _Rounds(
                self._model,
                slices=len(batches),
                labels={},
                most_bytes=0,
                blocks=self._blocks,
                gradients=sums,
                device=weights.device,
                machine=machine,
            )
            rounds.open(turns)
            try:
                with eval_mode(self._model), machine.computing(), torch.autograd.set_multithreading_enabled(False):
                    weights.leave(leaving)
                    machine.forget_threads()
                    given = {name: rounds.given(value) for name, value in model_kwargs.items()}
                    rounds.run(staged, [0] * len(batches), given)
            except RuntimeError as error:
                forget_frames(error)  # free what they hold, before the weights come back
                raise
            finally:
                self._rounds, self._blocks = None, []
                rounds.close()
                rounds.let_go()
                sums.clear()
                turns.let_go()
                machine.synchronize()  # copies may still be using what is freed now
                machine.forget_batches()
                machine.forget_threads()
                weights.come_back()
                machine.set_random_state(before)
        with machine.computing():
            weights.replace(states())
        return machine.peak_bytes()


def _recomputed(block: ModelBlock) -> ModelBlock:
    """The block with nothing saved for backward but its input: its backward computes all else again."""
    if block.recipe == EAGER or block.last or not block.index:
        return block
    other = copy(block)
    other.recipe, other.compiled_bytes = RECIPES["recompute"], 0
    return other


class _Sums:
    """The gradients of one block's weights, added up in fp32."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, k: int, gradient: Tensor, *, fresh: bool, last_block: bool) -> None:
        """Add `gradient`, that of slice `k`, to the sum for the weight `name`."""
        if name not in self._names:
            return
        if name in self._sums:
            self._sums[name].add_(gradient)
        else:
            self._sums[name] = gradient.to(torch.float32, copy=not fresh)

    def add_nothing(self, name: str) -> None:
        """Do nothing: no gradient has reached the weight `name` in this slice."""

    def take(self, name: str) -> Tensor | None:
        """The sum for the weight `name`, which is forgotten here; None if no gradient has reached it."""
        return self._sums.pop(name, None)

    def clear(self) -> None:
        """Drop all sums."""
        self._sums.clear()


class _Turns:
    """The order in which blocks run on slices. A block's weights are on the device from its first slice to its last."""

    def __init__(
        self, blocks: Sequence[ModelBlock], slices: int, weights: Weights, sums: _Sums, revise: Revise
    ) -> None:
        self._blocks, self._slices, self._sums, self._revise = blocks, slices, sums, revise
        self._device, self._on_host = weights.device, weights.host.items
        last = len(blocks) - 1
        stages = [(Direction.FORWARD, index) for index in range(last)]
        stages += [(Direction.HEAD, last), *((Direction.BACKWARD, index) for index in reversed(range(last)))]
        self._order = [_turn(direction, index, k) for direction, index in stages for k in range(slices)]
        self._at = 0
        self._brought: list[Item] = []

    @property
    def turn(self) -> Turn | None:
        """The turn that computes now or comes next; None after the last."""
        return self._order[self._at] if self._at < len(self._order) else None

    def start_turn(self) -> Turn:
        """Bring the weights of the turn's block to the device, if this is its first slice. Returns the turn."""
        turn = self.turn
        assert turn is not None
        if not turn.slice:
            device = self._device
            self._brought = [item for item in self._blocks[turn.block].items if item not in device.items]
            device.allocate(*self._brought)
            device.fetch(*self._brought)
        return turn

    def end_turn(self) -> None:
        """Revise the block's weights after its last slice's backward, and free them on the device."""
        turn = self.turn
        assert turn is not None
        self._at += 1
        if turn.slice < self._slices - 1:
            return
        if turn.direction is Direction.BACKWARD:
            names = self._blocks[turn.block].weights.values()
            here = {name: self._device.items[Item.weight(name)][0] for name in names}
            for name in sorted(names, key=lambda name: here[name].numel()):  # small sums go first
                if (gradient := self._sums.take(name)) is not None:
                    with torch.no_grad():
                        self._put(self._revise(name, gradient, here))
        self.clear()

    def _put(self, values: Mapping[str, Tensor]) -> None:
        """Replace the weights on the device and, where they have copies there, on the host."""
        items = [Item.weight(name) for name in values]
        for item, value in zip(items, values.values(), strict=True):
            self._device.items[item][0].copy_(value)
        self._device.send(*(item for item in items if item in self._on_host))

    def let_go(self) -> None:
        """Free the weights that were brought to the device, and drop the blocks, which refer to memory there."""
        self.clear()
        self._blocks = ()

    def clear(self) -> None:
        """Free the weights that were brought to the device."""
        self._device.free(*(item for item in self._brought if item in self._device.items))
        self._brought = []


def _turn(direction: Direction, index: int, k: int) -> Turn:
    stage = f"{direction.value}{index}"
    return Turn(Op(kind=OpKind.RUN, stage=stage, subject=f"{stage}.{k}"), direction, index, k)


class _Rounds(Rounds):
    """Runs blocks whose inputs wait on the host from forward to backward. `parked`: these inputs, which stay until all
    copies are done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parked: list[Tensor] = []

    def call(
        self, block: ModelBlock, k: int, code: BlockCode, tensors: Sequence[Tensor], pieces: Given
    ) -> Call | ChunkedCall:
        if block.last:  # its backward follows at once
            return super().call(block, k, code, tensors, pieces)
        return _ParkedCall(block, k, code, tensors, pieces, self._device, self._machine, self.parked)


class _ParkedCall(Call):
    def __init__(
        self,
        block: ModelBlock,
        k: int,
        pair: BlockCode,
        tensors: Sequence[Tensor],
        pieces: Given,
        device: Device,
        machine: Machine,
        parked: list[Tensor],
    ) -> None:
        super().__init__(block, k, pair, tensors, pieces, device)
        self._machine, self._all_parked = machine, parked
        self._parked: set[int] = set()

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        results, first = super().forward(tensors), self.pair.n_params + self.pair.n_buffers
        # The first argument is what the block before has made, also where no gradient goes there. All other arguments
        # but the one with a gradient are shared by blocks, such as rotary tables.
        for number in {first, first + (self.pair.interface or 0)}:
            if (x := self._primals.get(number)) is not None and x.is_contiguous():
                with self._machine.on_host():
                    parked = self._machine.host_empty(x.shape, x.dtype)
                parked.copy_(x, non_blocking=True)
                self._primals[number] = parked
                self._parked.add(number)
                self._all_parked.append(parked)
        return results

    def _primal(self, i: int) -> Tensor:
        value = super()._primal(i)
        if i not in self._parked:
            return value
        return torch.empty(value.shape, dtype=value.dtype, device=self._machine.device).copy_(value, non_blocking=True)
