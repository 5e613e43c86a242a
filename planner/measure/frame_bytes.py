"""Measures the bytes that a model's frame holds and needs. The frame is the model's forward outside the blocks, with
its part of backward.

The model's own forward, and the parts of backward between the blocks, run once for one micro-batch, on fake tensors.
Fake tensors have shapes, strides and lifetimes, so that a meter can count their bytes, but no memory. Parameters and
all that depends on them are fake. The batch, positions and masks (but those of very long rows) are real, so that code
that looks at them branches as in training.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from planner.errors import UserError, first_line
from planner.graph import (
    BlockCode,
    BlockNames,
    EagerPair,
    Joint,
    by_rows,
    flatten_call,
    mappings_of,
    run_slice,
    trace_block,
    tried_on_cpu,
)
from planner.graph.fake import FAKE_TYPES, FakeMode, fake_model, same_buffers
from planner.graph.scratch import ScratchMeter
from planner.graph.tangents import Layout
from planner.measure.fake_blocks import ChunkedStandIn, HeadStandIn, Shared, StandIn, not_profiled


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameBytes:
    """Bytes of the frame (the model's code outside the blocks) for one micro-batch; the tuples have one entry per
    block, in order. Weights, sums of gradients and buffers of the frame are not counted.

    start           the peak before the first block's forward begins
    forward_held    held when a block's forward begins, the block's input included
    forward_tail    the peak from the end of a block's forward to the next block, without tensors saved by blocks
    head_peak       the peak from the begin of the head's forward to the end of its backward, all included
    backward_held   held when a block's backward begins, the incoming gradients included; 0 for the head
    backward_tail   the peak from the end of a block's backward to the next block's backward; 0 for the head
    disordered      how many gradients are added up in another order than autograd's
    layouts         the strides with which the gradients of each block's results arrive, and which of its arguments have
                    a gradient that other readers have partly computed before; None for the head
    gradients       gradients of the frame's weights that appear after a block's backward; `backward_tail` counts them
    spread          names of the frame's weights that are read at several places between blocks
    """

    start: int
    forward_held: tuple[int, ...]
    forward_tail: tuple[int, ...]
    head_peak: int
    backward_held: tuple[int, ...]
    backward_tail: tuple[int, ...]
    gradients: tuple[int, ...]
    layouts: tuple[Layout | None, ...]
    disordered: int
    spread: tuple[str, ...]


def trace_blocks(
    model: nn.Module,
    names: BlockNames,
    batch: Mapping[str, Tensor],
    device: torch.device,
    model_kwargs: Mapping[str, Any],
    *,
    own_code_kinds: Collection[str] = (),
) -> dict[str, Joint | EagerPair]:
    """Trace the joint graph of each kind of block, with the arguments that the model passes to the first block of the
    kind. Returns kind -> joint graph of forward and backward. A layer that cannot be
    traced runs by the model's own code; its entry has the bytes that were measured while it ran. `own_code_kinds`:
    further
    kinds that run by the model's own code; these are not measured.

    Raises UserError "block-not-traceable" for an embedding or head that cannot be traced.
    """
    joints: dict[str, Joint | EagerPair] = dict(names.eager)
    mode = FakeMode()

    def enter(index: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kind, name = names.kinds[index], names.all[index]
        if kind in own_code_kinds and kind not in joints:
            joints[kind] = tried_on_cpu(module, args, kwargs, name=name)
        elif kind not in joints:
            try:
                joints[kind] = trace_block(module, args, kwargs, name=name)
            except UserError as error:
                if not 0 < index < len(names.all) - 1:
                    raise
                joints[kind] = EagerPair.measured(module, args, kwargs, name=name, reason=error.what)
        joint = joints[kind]
        outputs = mode.fresh(joint.output_values)
        grads = joint.result.differentiable
        results = [t.requires_grad_(d) for t, d in zip(outputs, grads, strict=True)]
        return joint.result.deliver(results, flatten_call(args, kwargs)[1], mappings_of(args, kwargs))

    with frame_alone(model, names, fake_model(model, mode, device), enter):
        model(**{name: t.to(device) for name, t in batch.items()}, **model_kwargs)
    return joints


def measure_frame(
    model: nn.Module,
    names: BlockNames,
    pairs: Mapping[str, Sequence[BlockCode]],
    batch: Mapping[str, Tensor],
    device: torch.device,
    model_kwargs: Mapping[str, Any],
    *,
    chunk_rows: int = 0,
) -> FrameBytes:
    """Measure the bytes of the model's code outside the blocks. A block may run by any code in `pairs` of its kind: if
    these keep different parts of the frame's tensors, the largest count is returned. `chunk_rows`: the head computes
    its loss in chunks of so many rows; 0: in one piece."""
    reading = {pair.keeps_interface for kind in names.kinds for pair in pairs[kind] if pair.interface is not None}
    runs = []
    for keep_input in sorted(reading) or [False]:  # none, where nothing below the head is trained
        run = _Run(model, names, pairs, device, keep_input=keep_input, chunk_rows=chunk_rows)
        run.run(batch, model_kwargs)
        runs.append(run)
    count = len(names.all)

    def most(table: Callable[[_Run], Mapping[int, int]]) -> tuple[int, ...]:
        return tuple(max(table(run).get(index, 0) for run in runs) for index in range(count))

    return FrameBytes(
        start=max(run.start for run in runs),
        forward_held=most(lambda run: run.held["F"]),
        forward_tail=most(lambda run: run.tail["F"]),
        head_peak=max(run.head_peak for run in runs),
        backward_held=most(lambda run: run.held["B"]),
        backward_tail=most(lambda run: run.tail["B"]),
        gradients=most(lambda run: run.gradients),
        layouts=tuple(map(runs[0].layouts.get, range(count))),
        disordered=runs[0].shared.disordered,
        spread=tuple(name for name, pieces in runs[0].read.items() if len(pieces) > 1),
    )


@contextlib.contextmanager
def frame_alone(
    model: nn.Module, names: BlockNames, weights: AbstractContextManager[None], enter: Callable[..., Any]
) -> Iterator[None]:
    """A context in which the model's blocks call `enter(index, module, *args, **kwargs)` instead of their forward. The
    context `weights` is entered, too. Raises UserError "frame-not-traceable" if the model's own code fails."""
    modules = [model.get_submodule(name) for name in names.all]

    def stand_in(index: int, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module.forward = forward  # because code that traces the block calls the module itself
        try:
            return enter(index, module, *args, **kwargs)
        finally:
            module.forward = functools.partial(stand_in, index, module, forward)

    own_forwards = [module.__dict__.get("forward") for module in modules]
    for index, module in enumerate(modules):
        module.forward = functools.partial(stand_in, index, module, module.forward)
    try:
        with (
            same_buffers(model),
            weights,
            torch.autograd.set_multithreading_enabled(False),
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
        ):
            yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own code failed; that is the cause to name
        cause = f"{type(error).__name__}: {first_line(error)}"
        if "backward through the graph a second time" in cause or "a block that has run backward" in cause:
            cause = (
                "the model's code reads a tensor before a block and again after it, but does not pass it to the block; "
                "the two gradients cannot be added in plain PyTorch's order"
            )
        raise not_profiled(cause) from error
    finally:
        for module, forward in zip(modules, own_forwards, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


class _Run:
    """One forward and backward of the model's code outside the blocks, with its bytes counted."""

    def __init__(
        self,
        model: nn.Module,
        names: BlockNames,
        pairs: Mapping[str, Sequence[BlockCode]],
        device: torch.device,
        *,
        keep_input: bool,
        chunk_rows: int,
    ) -> None:
        self.chunk_rows = chunk_rows
        self.model, self.names, self.pairs, self.device = model, names, pairs, device
        self.mode = FakeMode()
        self.meter = ScratchMeter(device.type, counted=FAKE_TYPES)
        self.shared = Shared(self.mode, self.meter, keep_input=keep_input)
        self.calls: dict[int, StandIn | ChunkedStandIn] = {}
        self.start = self.head_peak = 0
        self.held: dict[str, dict[int, int]] = {"F": {}, "B": {}}
        self.tail: dict[str, dict[int, int]] = {"F": {}, "B": {}}
        self.gradients: dict[int, int] = {}
        self.layouts: dict[int, Layout] = {}
        self.own: list[nn.Parameter] = []  # parameters outside the blocks: blocks compute no gradients here
        self.read: dict[str, set[int]] = {}  # weight outside the blocks -> parts of backward with a gradient for it
        self.piece = len(names.all)  # the part of backward that runs now, by the number of the block after it
        self.last: tuple[str, int, int] | None = None
        self.base = 0

    @property
    def head(self) -> int:
        return len(self.names.all) - 1

    def run(self, batch: Mapping[str, Tensor], model_kwargs: Mapping[str, Any]) -> None:
        weights = fake_model(self.model, self.mode, self.device)
        with frame_alone(self.model, self.names, weights, self.enter):
            with self.meter.host():
                for tensor in (*self.model.parameters(), *self.model.buffers(), *batch.values()):
                    self.meter.add(tensor)
            blocks = {id(p) for name in self.names.all for p in self.model.get_submodule(name).parameters()}
            hooks: list[RemovableHandle] = []
            for name, p in self.model.named_parameters():
                if id(p) not in blocks:
                    self.own.append(p)
                    if p.requires_grad:
                        reads = functools.partial(self.reads, name)
                        hooks.append(p.register_post_accumulate_grad_hook(reads))  # type: ignore[no-untyped-call]
            self.anchor = self.mode.scalar(self.device).requires_grad_()
            with self.meter.watch(), torch.no_grad():
                with torch.enable_grad():
                    loss = run_slice(self.model, batch, model_kwargs, self.device, self.shared.given)
                call = self.calls.pop(self.head)
                grads = call.backward(call.take_tangents())
                self.head_peak = self.meter.mark() - self.base
                call.x = None
                self.leave("F", self.head)
                self.piece = self.head
                call.pass_on(grads, self.calls.get(self.head - 1))
                call.clear()
                for index in reversed(range(self.head)):
                    self.arrive("B", index)
                    call = self.calls.pop(index)
                    tangents = call.take_tangents()
                    if call.layout is not None:
                        self.layouts[index] = call.layout
                    grads = call.backward(tangents)
                    tangents.clear()
                    self.leave("B", index)
                    self.piece = index
                    call.pass_on(grads, self.calls.get(index - 1))
                    call.clear()
                self.close_tail()
                del loss
            for hook in hooks:  # otherwise they would keep the model alive for good
                hook.remove()
            self.model.zero_grad()

    def enter(self, index: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.arrive("F", index)
        tensors = flatten_call(args, kwargs)[1]
        pairs = self.pairs[self.names.kinds[index]]
        name = self.names.all[index]
        call: StandIn | ChunkedStandIn
        if index != self.head:
            call = StandIn(self.shared, name, pairs, tensors)
        elif self.chunk_rows:
            call = ChunkedStandIn(self.shared, module, pairs, tensors, self.chunk_rows)
        else:
            call = HeadStandIn(self.shared, name, module, pairs, tensors)
        if len({(e.node, e.output_nr) for e in call.edges if e}) < sum(e is not None for e in call.edges):
            raise not_profiled(f"the block {name} is given one tensor twice")
        self.calls[index] = call
        result = call.enter(tensors, mappings_of(args, kwargs), self.anchor)
        if index == self.head:  # it goes on until its backward is done
            return by_rows(result, pairs[0])
        self.leave("F", index)
        return result

    def reads(self, name: str, parameter: Tensor) -> None:
        """Note that the part of backward that runs now has made a gradient for the weight `name` outside the blocks."""
        self.read.setdefault(name, set()).add(self.piece)

    def arrive(self, direction: str, index: int) -> None:
        """Note, as a block begins, which bytes are held now, and the peak since the last block. `direction`: "F" for
        its forward or "B" for its backward."""
        self.close_tail()
        self.base = self.charged_elsewhere()
        self.held[direction][index] = self.meter.now - self.base
        self.meter.mark()

    def leave(self, direction: str, index: int) -> None:
        # The block's own peak counts what is alive now; the tail is what the frame adds to it.
        self.meter.mark(alive=False)
        self.last = direction, index, self.charged_elsewhere()

    def close_tail(self) -> None:
        peak = self.meter.mark()
        if self.last is None:
            self.start = peak
        else:
            direction, index, base = self.last
            self.tail[direction][index] = max(0, peak - base)
            gradient_bytes = sum(p.grad.nbytes for p in self.own if p.grad is not None)
            self.gradients[index] = gradient_bytes - sum(self.gradients.values())

    def charged_elsewhere(self) -> int:
        """Bytes that do not count for the code outside the blocks: inputs kept for their block's backward, sums of the
        head's gradients, and gradients of weights outside the blocks, which count once for all micro-batches."""
        inputs = (call.x for call in self.calls.values())
        grads = (p.grad for p in self.own)
        tensors = [t for t in (*inputs, *grads, *self.shared.sums) if t is not None]
        storages = {t.untyped_storage()._cdata: self.meter.bytes_of(t) for t in tensors}
        return sum(storages.values())
