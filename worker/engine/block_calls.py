"""Runs one block of the model on one slice (micro-batch), with the weights and the offloaded activations that are on
the device now."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from planner.graph import EAGER, BlockCall, BlockCode, ChunkedHead, Recipe, logits_by_rows, loss_only, recipe_of
from planner.graph.call import Given
from planner.schedule.chain import Chain
from planner.schedule.items import Item
from planner.schedule.plan import Plan
from worker.engine.device_items import Device


class TakesGradients(Protocol):
    """Takes the gradients of weights as backward makes them: see worker.engine.gradients.Gradients."""

    def add(self, name: str, k: int, gradient: Tensor, *, fresh: bool, last_block: bool) -> None:
        """Take `gradient`, that of slice `k`, for the weight `name`. `fresh`: nothing else uses its memory.
        `last_block`: it comes from the last block's backward."""

    def add_nothing(self, name: str) -> None:
        """Note that no gradient has reached the weight `name` in this slice."""


class ModelBlock:
    """One block of the model (embedding, layer or head): its module, and the names of its weights in the model."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        *,
        name: str,
        kind: str,
        recipe: Recipe,
        names: Mapping[int, str],
        last: bool,
        chunk_rows: int = 0,
        compiled_bytes: int = 0,
    ) -> None:
        """`names`: id of a parameter -> its first name in `named_parameters()`. `last`: this is the head, which makes
        its loss in chunks of `chunk_rows` rows (0: in one piece). `compiled_bytes`: the bytes of the results of slices
        that run compiled code (0: none does)."""
        self.chunk_rows, self.compiled_bytes = chunk_rows, compiled_bytes
        self.index, self.module, self.name, self.recipe = index, module, name, recipe
        self.kind, self.last = kind, last
        self.weights = {local: names[id(p)] for local, p in module.named_parameters()}
        self.items = tuple(Item.weight(weight) for weight in self.weights.values())
        self._parameters = tuple((p, p.data) for _, p in module.named_parameters())
        self._own = module.__dict__.get("forward")
        self._buffers = [(part._buffers, key) for part in module.modules() for key in part._buffers]

    def buffers(self) -> list[Tensor]:
        """The module's buffers, as `module.buffers()` yields them, found once: walking over the modules at every call
        takes time."""
        buffers = (table[key] for table, key in self._buffers)
        return list({id(buffer): buffer for buffer in buffers if buffer is not None}.values())

    def let_go(self) -> None:
        """Drop the tensors on the device that stand in for the module's parameters, which are needed only during a
        step."""
        self._parameters = ()

    def replace_forward(self, forward: Callable[..., Any]) -> None:
        """Make calls of the block's module call `forward` in place of the module's own."""
        self.module.__dict__["forward"] = forward

    def give_back_forward(self) -> None:
        """Undo `replace_forward`: calls of the block's module run its own forward again."""
        if self._own is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self._own

    @contextlib.contextmanager
    def own_forward(self) -> Iterator[None]:
        """A context in which calls of the block's module run its own forward, in place of what `replace_forward` has
        set."""
        mine = self.module.__dict__["forward"]
        self.give_back_forward()
        try:
            yield
        finally:
            self.replace_forward(mine)

    @contextlib.contextmanager
    def loss_forward(self) -> Iterator[None]:
        """A context in which calls of the block's module run its own forward for a loss without gradients. The head's
        logits come in the form whose loss takes the least memory."""
        with self.own_forward():
            if not self.last:
                yield
                return
            before, own = self.module.__dict__.get("forward"), self.module.forward
            self.module.__dict__["forward"] = (
                loss_only(self.module, self.chunk_rows)
                if self.chunk_rows
                else lambda *args, **kwargs: logits_by_rows(own(*args, **kwargs))
            )
            try:
                yield
            finally:
                del self.module.__dict__["forward"]
                if before is not None:
                    self.module.__dict__["forward"] = before

    @contextlib.contextmanager
    def weights_in_place(self, items: Mapping[Item, Sequence[Tensor]]) -> Iterator[None]:
        """A context in which the module's parameters are the copies of its weights on the device, taken from `items`.
        All of them must be there."""
        try:
            for (parameter, _), item in zip(self._parameters, self.items, strict=True):
                parameter.data = items[item][0]
            yield
        finally:
            for parameter, hollow in self._parameters:
                parameter.data = hollow


def model_blocks(model: nn.Module, chain: Chain, plan: Plan) -> list[ModelBlock]:
    """The blocks of `model` (embedding, layers, head), each with the option that `plan` has for its activations, such
    as recompute or offload."""
    names = {id(p): name for name, p in model.named_parameters()}
    blocks = []
    for index, (block, option) in enumerate(zip(chain.blocks, plan.options, strict=True)):
        its = block.option(option)
        blocks.append(
            ModelBlock(
                index,
                model.get_submodule(block.name),
                name=block.name,
                kind=block.kind,
                recipe=EAGER if its.recipe == EAGER.name else recipe_of(its.recipe, its.name),
                names=names,
                last=index == len(chain.blocks) - 1,
                chunk_rows=its.chunk_rows,
                compiled_bytes=block.output_bytes if its.compiled else 0,
            )
        )
    return blocks


class Call(BlockCall):
    """One block's forward and backward on one slice (micro-batch). Between the two it keeps what backward needs, apart
    from weights and offloaded activations."""

    def __init__(
        self, block: ModelBlock, k: int, pair: BlockCode, tensors: Sequence[Tensor], pieces: Given, device: Device
    ) -> None:
        super().__init__(pair, tensors, pieces)
        self.block, self.k = block, k
        self._items, self._device_type = device.items, device.type
        recipe = block.recipe  # not the code's: blocks that save alike share their code
        self._item = Item.activations(block.index, k) if recipe.offloads or recipe.offloads_input else None
        self._input: int | None = None  # the input's number among the primals, if the item holds it
        if recipe.offloads_input and pair.interface is not None:
            self._input = pair.n_params + pair.n_buffers + pair.interface
        self._primals: dict[int, Tensor] = {}
        self._saved: list[Tensor] = []
        self._moved: list[bool] = []
        self._states: list[Tensor] = []

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the block's forward on `tensors` and return its outputs. Backward takes the weights from the device
        again. The block's input (unless it is offloaded), masks and rotary tables are kept without copies. `tensors` is
        emptied, so that the caller keeps none of them alive."""
        pair = self.pair
        values = [*(self._items[item][0] for item in self.block.items), *self.block.buffers(), *tensors]
        tensors.clear()
        self._primals = {i: values[i] for i in pair.backward_primals if i >= pair.n_params}
        results, self._states = pair.forward(values)
        self._saved = results[pair.n_outputs :]
        if self._item:
            with torch._C.DisableTorchFunction():  # the mode that watches the frame's operations need not see these
                self._leave(self._item)
        return results[: pair.n_outputs]

    def _leave(self, item: Item) -> None:
        """Make the tensors that are to be offloaded the item of this block's activations on the device."""
        # Attention on CUDA leaves the seed of its dropout on the host; it stays with the call. The device that the
        # trace gives for such a tensor may be wrong, so the tensors themselves are asked.
        self._moved = [self.block.recipe.offloads and t.device.type == self._device_type for t in self._saved]
        self._items[item] = [t for t, moved in zip(self._saved, self._moved, strict=True) if moved]
        self._saved = [t for t, moved in zip(self._saved, self._moved, strict=True) if not moved]
        if self._input is not None:
            self._items[item].append(self._primals.pop(self._input))

    def backward(self, sums: TakesGradients) -> list[Tensor | None]:
        """Run the block's backward. Returns the gradients of its tensor arguments; adds the gradients of weights to
        `sums`."""
        tangents = self.take_tangents()
        pair = self.pair
        if self._item:
            fetched, here = iter(self._items.pop(self._item)), iter(self._saved)
            self._saved = [next(fetched if moved else here) for moved in self._moved]
            if self._input is not None:
                self._primals[self._input] = next(fetched)
            del fetched, here
        values = [*self._saved, *(self._primal(i) for i in pair.backward_primals), *tangents]
        tangents.clear()
        self._saved = []
        result = pair.backward(values, self._states, functools.partial(self._add, sums))
        self._primals, self._states = {}, []
        return result

    def _primal(self, i: int) -> Tensor:
        return self._items[self.block.items[i]][0] if i < self.pair.n_params else self._primals[i]

    def _add(self, sums: TakesGradients, local: str, gradient: Tensor | None) -> None:
        block = self.block
        if gradient is None:
            sums.add_nothing(block.weights[local])
            return
        sums.add(block.weights[local], self.k, gradient, fresh=self.pair.adoptable[local], last_block=block.last)


class ChunkedCall(ChunkedHead):
    """The head's forward and backward on one slice (micro-batch), with the loss computed in chunks of rows, so that not
    all logits exist at a time."""

    def __init__(
        self, block: ModelBlock, k: int, pair: BlockCode, tensors: Sequence[Tensor], pieces: Given, device: Device
    ) -> None:
        super().__init__(pair, tensors, block.chunk_rows, pieces)
        self.block, self.k, self._items = block, k, device.items

    def weights(self) -> dict[str, Tensor]:
        """The head's weights on the device, by their names in the module."""
        return {local: self._items[Item.weight(name)][0] for local, name in self.block.weights.items()}

    def backward(self, sums: TakesGradients) -> list[Tensor | None]:
        """Run the head's backward. Returns the gradient of its input; adds the gradients of weights to `sums`."""
        names, k = self.block.weights, self.k
        return self.finish(lambda local, grad: sums.add(names[local], k, grad, fresh=True, last_block=True))
