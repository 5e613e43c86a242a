"""Runs one micro-batch without the layers, to measure the time of the head, its loss, and the model's code outside the
blocks.

The model's own forward and backward run on the device, on random data. The head is real. The other blocks compute
nothing, but are called as in training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.graph import (
    BlockCall,
    BlockCode,
    BlockNames,
    ChunkedHead,
    Sink,
    by_rows,
    flatten_call,
    items_for,
    mappings_of,
    run_slice,
)
from planner.graph.call import Given
from planner.graph.fake import other_weights
from planner.graph.sample import random_data
from planner.measure.frame_bytes import frame_alone
from planner.schedule.chain import slice_size


@contextlib.contextmanager
def rehearsal(
    model: nn.Module,
    names: BlockNames,
    pairs: Mapping[str, BlockCode],
    batch: Mapping[str, Tensor],
    device: torch.device,
    *,
    chunk_rows: int,
    sink: Sink,
) -> Iterator[Callable[[], None]]:
    """A context that yields a function to time: it runs one micro-batch of `model` forward and backward without the
    layers' work. The model's weights may be on any device. `pairs`: kind of block -> one of its codes. `chunk_rows`:
    the head computes its loss in chunks of so many rows; 0: in one piece. `sink` gets the name and gradient of each of
    the head's weights.

    Raises torch.OutOfMemoryError if this does not fit the device.
    """
    head = {id(p) for p in model.get_submodule(names.head).parameters()}
    others = {id(p) for name in names.all for p in model.get_submodule(name).parameters()} - head

    def weight(tensor: Tensor) -> Tensor:
        if id(tensor) in others:  # nobody reads them
            return torch.empty((1,) * tensor.dim(), dtype=tensor.dtype, device=device).expand(tensor.shape)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).normal_(std=0.02)

    run = _Run(model, names, pairs, batch, device, chunk_rows, sink)
    with frame_alone(model, names, other_weights(model, weight), run.enter):
        yield run.once


class _Run:
    def __init__(
        self,
        model: nn.Module,
        names: BlockNames,
        pairs: Mapping[str, BlockCode],
        batch: Mapping[str, Tensor],
        device: torch.device,
        chunk_rows: int,
        sink: Sink,
    ) -> None:
        self.model, self.names, self.pairs, self.batch, self.device = model, names, pairs, batch, device
        self.chunk_rows, self.sink = chunk_rows, sink
        layers = {kind: pairs[kind] for kind in names.kinds[:-1]}
        self.outputs = {kind: [random_data(v, device) for v in pair.output_values] for kind, pair in layers.items()}
        self.gradients = {
            kind: [None if v is None else random_data(v, device) for v in pair.input_grad_values]
            for kind, pair in layers.items()
        }
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.calls: dict[int, _Silent | _Head | _Chunks] = {}
        self.given: Given = Given()

    @torch.no_grad()
    def once(self) -> None:
        self.given = Given()
        tokens = items_for(self.model, slice_size({name: t.shape for name, t in self.batch.items()}))
        with torch.enable_grad():
            run_slice(self.model, self.batch, tokens, self.device, self.given)
        for index in reversed(range(len(self.names.all))):
            call = self.calls.pop(index)
            call.pass_on(call.backward(), self.calls.get(index - 1))
            call.clear()
        self.model.zero_grad()

    def enter(self, index: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors, kind = flatten_call(args, kwargs)[1], self.names.kinds[index]
        pair = self.pairs[kind]
        call: _Silent | _Head | _Chunks
        if index < len(self.names.all) - 1:
            call = _Silent(pair, tensors, self.given, self.outputs[kind], self.gradients[kind])
        elif self.chunk_rows:
            call = _Chunks(pair, tensors, self.given, self.chunk_rows, module, self.sink)
        else:
            call = _Head(pair, tensors, self.given, module, self.sink)
        self.calls[index] = call
        result = call.enter(tensors, mappings_of(args, kwargs), self.anchor)
        return by_rows(result, pair) if isinstance(call, _Head) else result


class _Silent(BlockCall):
    """A stand-in for a block that computes nothing: its results and gradients were made beforehand."""

    def __init__(
        self,
        pair: BlockCode,
        tensors: Sequence[Tensor],
        pieces: Given,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        super().__init__(pair, tensors, pieces)
        self._outputs, self._gradients = outputs, gradients

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        tensors.clear()
        return [tensor.detach() for tensor in self._outputs]

    def backward(self) -> list[Tensor | None]:
        """The gradients of the block's arguments, made beforehand."""
        self.take_tangents()
        return list(self._gradients)


class _Head(BlockCall):
    """The head, run by its generated code."""

    def __init__(
        self, pair: BlockCode, tensors: Sequence[Tensor], pieces: Given, module: nn.Module, sink: Sink
    ) -> None:
        super().__init__(pair, tensors, pieces)
        self._primals, self._sink = [*(p.detach() for p in module.parameters()), *module.buffers()], sink

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        primals = [*self._primals, *tensors]
        tensors.clear()
        for_backward = [primals[i] for i in self.pair.backward_primals]
        results, self._states = self.pair.forward(primals)
        self._saved = [*results[self.pair.n_outputs :], *for_backward]
        return results[: self.pair.n_outputs]

    def backward(self) -> list[Tensor | None]:
        """The gradients of the head's arguments; those of its weights go to the sink."""
        values = [*self._saved, *self.take_tangents()]
        self._saved = []
        return self.pair.backward(values, self._states, self._sink)


class _Chunks(ChunkedHead):
    """The head with its loss in chunks of rows."""

    def __init__(
        self, pair: BlockCode, tensors: Sequence[Tensor], pieces: Given, chunk_rows: int, module: nn.Module, sink: Sink
    ) -> None:
        super().__init__(pair, tensors, chunk_rows, pieces)
        self._weights, self._sink = {name: p.detach() for name, p in module.named_parameters()}, sink

    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def backward(self) -> list[Tensor | None]:
        """The gradient of the head's input."""
        return self.finish(self._sink)
