"""Records as text which memory a model's frame allocates and frees, one text for each stage: a block's forward or
backward with the frame's code after it. The frame is the model's code outside the blocks.

The frame's forward and backward run once for one micro-batch on fake tensors, as in `planner.measure.frame_bytes`.
Blocks do not run here: `planner.graph.lifetimes` records them. The text has the words of that module and three more.

    F1  "@3,1>4 -3"
    B1  "@7*>9,- +10:64 $0:10"

`@3,1>4`   the block runs: it gets storages 3 and 1, and makes storage 4 as its result. In backward these are the
           incoming gradients and the gradients of the block's arguments. What the head allocates is written in full
`7*`       only the block still holds this storage: it is freed when the block's code releases it
`$0:10`    storage 10 is the gradient of the frame's parameter 0, and stays until its update
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import Exit, UserError
from planner.graph import (
    EAGER,
    BlockCode,
    BlockNames,
    EagerPair,
    Recipe,
    by_rows,
    flatten_call,
    make_pairs,
    mappings_of,
    run_slice,
)
from planner.graph.fake import FAKE_TYPES, FakeMode, fake_model
from planner.graph.scratch import ScratchMeter
from planner.graph.tangents import Layout
from planner.measure.fake_blocks import ChunkedStandIn, HeadStandIn, Shared, StandIn
from planner.measure.frame_bytes import frame_alone, measure_frame, trace_blocks
from planner.schedule.chain import Lifetimes


def frame_lifetimes(
    model: nn.Module,
    names: BlockNames,
    pairs: Mapping[str, Sequence[BlockCode]],
    batch: Mapping[str, Tensor],
    device: torch.device,
    model_kwargs: Mapping[str, Any],
    *,
    chunk_rows: int = 0,
) -> tuple[str, ...]:
    """The allocations of the model's code outside the blocks, as text, for each stage of one micro-batch: forward of
    each block in order, the head, then backward of each block (F0 … H … B0). All code of a kind in `pairs` gives the
    same text."""
    run = _Run(model, names, {kind: codes[0] for kind, codes in pairs.items()}, device, chunk_rows)
    run.run(batch, model_kwargs)
    return tuple(" ".join(stage) for stage in run.log.stages)


def block_lifetimes(
    names: BlockNames, pairs: Mapping[str, Mapping[str, BlockCode]], layouts: Sequence[Layout | None]
) -> tuple[Lifetimes, ...]:
    """The allocations of each kind of block under each option (way to treat activations). The head is left out: its
    allocations are in the text of `frame_lifetimes`. `layouts`: the strides of each block's incoming gradients."""
    lifetimes = []
    for kind in dict.fromkeys(names.kinds[:-1]):
        layout = layouts[names.kinds.index(kind)]
        for option, pair in pairs[kind].items():
            first = pair.n_params + pair.n_buffers
            sent = pair.interface if pair.recipe.offloads_input and pair.reads_interface else None
            forward, backward = (pair.for_tangents(layout) if layout is not None else pair).lifetimes()
            lifetimes.append(
                Lifetimes(
                    kind=kind,
                    option=option,
                    forward=forward,
                    backward=backward,
                    sent=sent,
                    kept=tuple(i - first for i in pair.backward_primals if i >= first and i - first != sent),
                )
            )
    return tuple(lifetimes)


def one_layout_a_kind(
    names: BlockNames, pairs: dict[str, dict[str, BlockCode]], layouts: Sequence[Layout | None]
) -> tuple[BlockNames, dict[str, dict[str, BlockCode]]]:
    """Split kinds of blocks so that all blocks of a kind get gradients with the same strides: with others a block's
    backward allocates other memory. Returns the names with the new kinds, and the code for each of them."""
    layouts_of: dict[str, list[Layout | None]] = {}
    kinds = []
    for kind, layout in zip(names.kinds, layouts, strict=True):
        known = layouts_of.setdefault(kind, [])
        if layout not in known:
            known.append(layout)
        number = known.index(layout)
        kinds.append(f"{kind}.{number}" if number else kind)
    codes = {new: pairs[old] for new, old in zip(kinds, names.kinds, strict=True)}
    eager = {new: names.eager[old] for new, old in zip(kinds, names.kinds, strict=True) if old in names.eager}
    return replace(names, kinds=tuple(kinds), eager=eager), codes


def lifetimes_of(
    model: nn.Module,
    names: BlockNames,
    recipes: Mapping[str, Collection[Recipe]],
    batch: Mapping[str, Tensor],
    device: torch.device,
    model_kwargs: Mapping[str, Any],
    *,
    chunk_rows: int = 0,
) -> tuple[tuple[Lifetimes, ...], tuple[str, ...]]:
    """What blocks and frame (the model's code outside them) allocate for micro-batches like `batch`, whose shape may
    differ from the one for which `names.kinds` was found. `recipes`: kind of block -> its recipes, named as its
    options. Layers that run by their own code are not measured: their areas have size 0. Raises UserError, also if a
    layer cannot be traced although its kind could when the plan was made."""
    pairs: dict[str, dict[str, BlockCode]] = {}
    own_code_kinds = {kind for kind, its in recipes.items() if EAGER in its}
    for kind, joint in trace_blocks(model, names, batch, device, model_kwargs, own_code_kinds=own_code_kinds).items():
        if not isinstance(joint, EagerPair):
            pairs[kind] = {**make_pairs(joint, recipes[kind])}
        elif kind in own_code_kinds:
            pairs[kind] = {EAGER.name: joint}
        else:
            raise UserError(
                f"The code of the layer {joint.name} cannot be traced for a plan.",
                code="block-not-traceable",
                exit_code=Exit.USAGE,
            )
    codes = {kind: tuple(by_option.values()) for kind, by_option in pairs.items()}
    layouts = measure_frame(model, names, codes, batch, device, model_kwargs, chunk_rows=chunk_rows).layouts
    frame = frame_lifetimes(model, names, codes, batch, device, model_kwargs, chunk_rows=chunk_rows)
    return block_lifetimes(names, pairs, layouts), frame


class _Log(ScratchMeter):
    """A meter that writes each allocation and release into a text."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type, counted=FAKE_TYPES)
        self.stages: list[list[str]] = [[]]
        self.quiet = False  # while a block's stand-in runs: `turn` writes its results
        self.dropped: set[int] = set()  # while quiet
        self._numbers: dict[int, int] = {}
        self._count = 0

    def add(self, tensor: Tensor) -> None:
        if tensor.device.type == self.device and self._key(tensor) not in self._sizes:
            super().add(tensor)
            if size := self._sizes[self._key(tensor)]:
                self._numbers[self._key(tensor)] = self._count
                if not self.quiet:
                    self.write(f"+{self._count}:{size}")
                self._count += 1

    def _drop(self, key: int, reference: object) -> None:
        super()._drop(key, reference)
        number = self._numbers.pop(key, None)
        if number is not None and self.quiet:
            self.dropped.add(number)
        elif number is not None:
            self.write(f"-{number}")

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def come(self, size: int) -> int:
        super().come(size)
        self.write(f"%{self._count}:{size}")
        self._count += 1
        return self._count - 1

    def go(self, number: int, size: int) -> None:
        super().go(number, size)
        self.write(f"-{number}")

    def write(self, event: str) -> None:
        self.stages[-1].append(event)

    def number(self, tensor: Tensor | None) -> str:
        """The number of a tensor's storage; "-" for one that is not counted, such as a weight or a buffer."""
        number = self._numbers.get(self._key(tensor)) if tensor is not None else None
        return "-" if number is None else str(number)

    def turn(self, arguments: Sequence[str], results: Sequence[str]) -> None:
        """Write down the run of a block whose stand-in has just returned."""
        marked = [f"{name}*" if name != "-" and int(name) in self.dropped else name for name in arguments]
        others = self.dropped - {int(name) for name in arguments if name != "-"}
        self.quiet, self.dropped = False, set()
        self.write(f"@{','.join(marked)}>{','.join(results)}")
        for number in sorted(others):
            self.write(f"-{number}")


class _Shared(Shared):
    """A `Shared` that also notes in `last` the storages made last. `locals`: names of the head's
    parameters, in order."""

    def __init__(self, mode: FakeMode, log: _Log, locals: Sequence[str]) -> None:
        super().__init__(mode, log, keep_input=False)
        self.log, self.locals, self.last = log, locals, list[str]()

    def fresh(self, values: Sequence[Tensor]) -> list[Tensor]:
        fakes = super().fresh(values)
        self.last = list(map(self.log.number, fakes))
        return fakes


class _Aside(StandIn):
    """A stand-in for a block that keeps none of its arguments: what the block keeps is in the lifetimes of its own
    code."""

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        tensors.clear()
        return self.shared.fresh(self.pair.output_values)


class _Head(HeadStandIn):
    def add(self, name: str, gradient: Tensor | None) -> None:
        assert gradient is not None
        _tell(self, name, gradient, adoptable=self.pair.adoptable[name])


class _ChunkedHead(ChunkedStandIn):
    def backward(self, tangents: list[Tensor]) -> list[Tensor | None]:
        return self.finish(lambda name, gradient: _tell(self, name, gradient, adoptable=True))


def _tell(head: _Head | _ChunkedHead, local: str, gradient: Tensor, *, adoptable: bool) -> None:
    """Write down the gradient of one of the head's weights."""
    assert isinstance(head.shared, _Shared)
    k, log = head.shared.locals.index(local), head.shared.log
    if adoptable and gradient.is_contiguous():
        log.write(f"!{k}:{log.number(gradient)}")
    else:
        log.write(f"?{k}:{gradient.numel() * gradient.element_size()}")


class _Run:
    """One forward and backward of the model's code outside the blocks, with its allocations written down."""

    def __init__(
        self,
        model: nn.Module,
        names: BlockNames,
        pairs: Mapping[str, BlockCode],
        device: torch.device,
        chunk_rows: int,
    ) -> None:
        self.model, self.names, self.pairs, self.device, self.chunk_rows = model, names, pairs, device, chunk_rows
        self.mode, self.log = FakeMode(), _Log(device)
        self.shared = _Shared(self.mode, self.log, list(dict(model.get_submodule(names.head).named_parameters())))
        self.calls: dict[int, StandIn | ChunkedStandIn] = {}

    def run(self, batch: Mapping[str, Tensor], model_kwargs: Mapping[str, Any]) -> None:
        head, log = len(self.names.all) - 1, self.log
        weights = fake_model(self.model, self.mode, self.device)
        with frame_alone(self.model, self.names, weights, self.enter):
            parameters = self._own_parameters()
            with log.host():
                for tensor in (*self.model.parameters(), *self.model.buffers(), *batch.values()):
                    log.add(tensor)
                self.anchor = self.mode.scalar(self.device).requires_grad_()
            with log.watch(), torch.no_grad():
                with torch.enable_grad():
                    loss = run_slice(self.model, batch, model_kwargs, self.device, self.shared.given)
                call = self.calls.pop(head)
                grads = call.backward(call.take_tangents())
                call.x = None
                call.pass_on(grads, self.calls.get(head - 1))
                call.clear()
                gradients = self._gradients(parameters)
                for index in reversed(range(head)):
                    log.stages.append([])
                    call = self.calls.pop(index)
                    tangents = call.take_tangents()
                    tangent_numbers = list(map(log.number, tangents))
                    log.quiet = True
                    grads = call.backward(tangents)
                    tangents.clear()
                    log.turn(tangent_numbers, list(map(log.number, grads)))
                    call.pass_on(grads, self.calls.get(index - 1))
                    call.clear()
                    gradients |= self._gradients(parameters, gradients)
                del loss
            self.model.zero_grad()

    def _own_parameters(self) -> list[nn.Parameter]:
        blocks = {id(p) for name in self.names.all for p in self.model.get_submodule(name).parameters()}
        return [p for p in self.model.parameters() if id(p) not in blocks]

    def _gradients(self, parameters: Sequence[nn.Parameter], before: frozenset[int] = frozenset()) -> frozenset[int]:
        """Write down the gradients of weights outside the blocks that are new since `before`; return all that exist
        now."""
        new = {k for k, p in enumerate(parameters) if p.grad is not None} - before
        for k in sorted(new):
            self.log.write(f"${k}:{self.log.number(parameters[k].grad)}")
        return before | new

    def enter(self, index: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        log, name, tensors = self.log, self.names.all[index], flatten_call(args, kwargs)[1]
        mappings, pair = mappings_of(args, kwargs), self.pairs[self.names.kinds[index]]
        if index:  # what comes before the first block belongs to its stage
            log.stages.append([])
        if index < len(self.names.all) - 1:
            call = self.calls[index] = _Aside(self.shared, name, (pair,), tensors)
            numbers = list(map(log.number, tensors))
            log.quiet = True
            result = call.enter(tensors, mappings, self.anchor)
            log.turn(numbers, self.shared.last)
            return result
        if self.chunk_rows:
            chunked = self.calls[index] = _ChunkedHead(self.shared, module, (pair,), tensors, self.chunk_rows)
            return chunked.enter(tensors, mappings, self.anchor)
        whole = self.calls[index] = _Head(self.shared, name, module, (pair,), tensors)
        return by_rows(whole.enter(tensors, mappings, self.anchor), pair)
