"""Runs a round, a group of slices (micro-batches): forwards in lockstep, each followed by the head's backward, then the
other blocks' backwards in a loop."""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.graph import (
    EAGER,
    BlockCode,
    CannotCompileError,
    CompiledPair,
    EagerPair,
    Joint,
    Pair,
    by_rows,
    depends_on_data,
    flatten_call,
    label,
    mappings_of,
    run_slice,
    trace_block,
)
from planner.graph.call import Given
from planner.schedule.plan import Direction
from planner.units import format_bytes, format_bytes_down
from worker.engine.block_calls import Call, ChunkedCall, ModelBlock, TakesGradients
from worker.engine.device_items import Device
from worker.engine.lockstep import Lockstep, Turns
from worker.runtime.machine import Machine

log = logging.getLogger(__name__)


class Rounds:
    """Runs an engine's model forward and backward, with generated code in place of its blocks' own.

    codes    generated code, made at a block's first call and shared by all blocks of its kind that save alike
    calls    (block, slice) -> the call that waits there for its backward
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        slices: int,
        labels: Mapping[str, str],
        most_bytes: int,
        blocks: Sequence[ModelBlock],
        gradients: TakesGradients,
        device: Device,
        machine: Machine,
    ) -> None:
        """`labels`: stage of a turn -> what it is called in profiles. `most_bytes`: the most device bytes that a block
        may need that runs by its own code; 0: any."""
        self._model, self._slices, self._head = model, slices, len(blocks) - 1
        self._gradients, self._device, self._machine = gradients, device, machine
        self._labels, self._most_bytes = labels, most_bytes
        # It gives a block without a differentiable argument a node in the frame's graph.
        self._anchor = torch.zeros((), device=machine.device, requires_grad=True)
        self.codes: dict[Hashable, BlockCode] = {}
        self.calls: dict[tuple[int, int], Call | ChunkedCall] = {}
        self._joints: dict[Hashable, Joint] = {}
        self._given_to: list[Given] = []  # what blocks of each slice were given
        self._cursor: Turns  # `open` sets both
        self._lockstep: Lockstep

    def open(self, cursor: Turns) -> None:
        """Take the order of turns from `cursor`, until `close`."""
        self._cursor = cursor
        self._lockstep = Lockstep(self._slices, cursor, self._machine)

    def given(self, value: Any) -> Any:
        """The keyword argument `value` in the form in which the model gets it. A tensor is copied to the device once
        for all slices; if the model copied it, the host would wait for the device in every slice."""
        if not isinstance(value, Tensor) or value.device.type == self._machine.device.type != "cpu":
            return value
        return self._machine.stage(value).to(self._machine.device, non_blocking=True)

    def run(
        self, batches: Sequence[Mapping[str, Tensor]], seeds: Sequence[int], model_kwargs: Mapping[str, Any]
    ) -> list[Tensor]:
        """Run one round: forward and backward of its slices `batches`, slice k under the random seed `seeds[k]`. Adds
        their gradients to the sums and returns what is kept of each (`planner.graph.value_of`). Raises any error of
        the model, of a copy or of an update."""
        results: dict[int, Tensor] = {}
        self._given_to = [Given() for _ in range(self._slices)]
        body = functools.partial(self._to_head, results, batches, model_kwargs)
        self._lockstep.run(body, [self._machine.seeded(seed) for seed in seeds])
        self._machine.batches_were_read()
        with torch.no_grad():
            while (turn := self._cursor.turn) is not None and turn.direction is Direction.BACKWARD:
                self._cursor.start_turn()
                self._backward(turn.block, turn.slice)
                self._cursor.end_turn()
        return [results[k] for k in range(self._slices)]

    def _to_head(
        self,
        results: dict[int, Tensor],
        batches: Sequence[Mapping[str, Tensor]],
        model_kwargs: Mapping[str, Any],
        k: int,
    ) -> None:
        """The model's forward on slice `k`, and the head's backward. It is not a function inside `run`, because frames
        keep their function's closure, even after `forget_frames` has emptied them."""
        with torch.enable_grad():
            with self._machine.frame(batches[k]):
                results[k] = run_slice(self._model, batches[k], model_kwargs, self._machine.device, self._given_to[k])
            self._backward(self._head, k)

    def _backward(self, block: int, k: int) -> None:
        call = self.calls.pop((block, k), None)
        if call is None:
            raise RuntimeError(f"slice {k} ended without a forward of block {block}")
        direction = Direction.HEAD if block == self._head else Direction.BACKWARD
        try:
            with label(self._label(f"{direction}{block}")):
                grads = call.backward(self._gradients)
                self._check_bytes(call.block)
                call.pass_on(grads, self.calls.get((block - 1, k)))
        finally:
            call.clear()

    def enter(self, block: ModelBlock, *args: Any, **kwargs: Any) -> Any:
        """Run `block` on these arguments as one autograd node, in place of its module's forward, when the slice's turn
        has come."""
        with torch._C.DisableTorchFunction():  # else the frame's mode would look at each `t.shape` here
            shape, tensors = flatten_call(args, kwargs)
        # A block that runs its own code shares it with no other block.
        kind = block.index if block.recipe == EAGER else block.kind
        key = kind, block.recipe.saves, block.compiled_bytes, shape.key
        code = self.codes.get(key)
        if code is None:
            code = self.codes[key] = self.make_code(block, args, kwargs)
        with torch._C.DisableTorchFunction():
            turn = self._lockstep.gate(block.index)
            call = self.call(block, turn.slice, code, tensors, self._given_to[turn.slice])
        self.calls[block.index, turn.slice] = call
        with label(self._label(turn.op.stage)):
            result = call.enter(tensors, mappings_of(args, kwargs), self._anchor)
        self._check_bytes(block)
        if not block.last:
            return result
        with torch._C.DisableTorchFunction():
            return by_rows(result, code)

    def call(
        self, block: ModelBlock, k: int, code: BlockCode, tensors: Sequence[Tensor], pieces: Given
    ) -> Call | ChunkedCall:
        """A new call of `block` for slice `k`."""
        made = ChunkedCall if block.chunk_rows else Call
        return made(block, k, code, tensors, pieces, self._device)

    def _label(self, stage: str) -> str:
        return self._labels.get(stage, stage)

    def _check_bytes(self, block: ModelBlock) -> None:
        """Raise UserError "block-depends-on-data" where own code has needed more than the plan has room for."""
        peak = self._machine.peak_bytes() if block.recipe == EAGER else None
        if peak is not None and peak > self._most_bytes > 0:
            raise depends_on_data(
                block.name, f"{format_bytes(peak)} were needed, the plan has {format_bytes_down(self._most_bytes)}"
            )

    def make_code(self, block: ModelBlock, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BlockCode:
        """Generate the forward and backward code of `block` for arguments like these."""
        with self._machine.on_host(), block.own_forward():
            if block.recipe == EAGER:
                eager = EagerPair(block.module, args, kwargs, name=block.name)
                eager.own_code, eager.moves = self._machine.own_code, self._machine.device.type == "cuda"
                return eager
            joint = self._trace(block, args, kwargs)
            if missing := block.recipe.not_in(joint.module.graph):
                # The shape or the version of torch differs. The numbers are the same, the bytes perhaps not.
                log.warning("%s makes no %s, which the plan saves: computed again", block.name, ", ".join(missing))
            pair = Pair(joint, block.recipe)
            # The plan has room for compiled code of the planned shape; its bytes for shorter slices are not measured.
            if pair.output_bytes == block.compiled_bytes:
                try:
                    return CompiledPair(pair)
                except CannotCompileError as error:
                    log.warning("compile: %s runs as generated: %s", block.name, error)
            return pair

    def _trace(self, block: ModelBlock, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Joint:
        """One trace serves all blocks of a kind, whatever each of them saves."""
        key = block.kind, flatten_call(args, kwargs)[0].key
        if key not in self._joints:
            self._joints[key] = trace_block(block.module, args, kwargs, name=block.name)
        return self._joints[key]

    def warm_up(self) -> None:
        """Make libraries allocate their device workspaces in each thread that computes."""
        self._lockstep.everywhere(self._machine.warm_up)

    def clear(self) -> None:
        """Drop the calls that wait for their backward, after an error in a step."""
        for call in self.calls.values():
            call.clear()
        self.calls.clear()
        self._given_to.clear()  # only these still hold the call that failed

    def let_go(self) -> None:
        """Drop all references to tensors on the device. Nothing can be run afterwards."""
        self.clear()
        self._anchor, self.codes, self._joints = torch.zeros(()), {}, {}

    def close(self) -> None:
        """End the threads in which slices compute."""
        self._lockstep.close()
