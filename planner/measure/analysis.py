"""Analyses a model for the planner: its blocks, their tensors, and the bytes under each way to treat activations. With
times added, the analysis becomes a `Chain`, the model as the planner sees it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from planner.cpu.adamw import cpu_kernel
from planner.errors import Exit, UserError
from planner.graph import (
    RECIPES,
    BlockCode,
    BlockNames,
    EagerPair,
    check_chunked,
    find_blocks,
    items_for,
    let_go,
    make_pairs,
    recipes_on_front,
    refuse_autocast,
    trials,
)
from planner.graph import chunk_rows as rows_of_a_chunk
from planner.job.schema import Job
from planner.machine.hardware import Hardware
from planner.measure.change_bytes import NO_CHANGE, ChangeBytes, change_bytes
from planner.measure.choose_compiled import with_compiled
from planner.measure.frame_bytes import FrameBytes, measure_frame, trace_blocks
from planner.measure.frame_lifetimes import block_lifetimes, frame_lifetimes, one_layout_a_kind
from planner.measure.gpu_card import scalar_bytes, staged_bytes, workspace_bytes
from planner.measure.head_time import rehearsal
from planner.measure.times import (
    CompiledBytes,
    Times,
    UpdateTimes,
    device_name,
    estimate_pairs,
    forget,
    measure_pairs,
    measure_rest,
    sums,
)
from planner.measure.updates import estimate_updates, measure_updates, untimed_updates
from planner.models.hf_model import sample_batch, skeleton_model
from planner.models.isolation import check_isolation
from planner.models.trainer_options import check_trainer_options
from planner.optimizers.table import ADAMW, NONE, OPTIMIZERS, AnyOptimizer
from planner.schedule.chain import Block, Chain, Lifetimes, Option, Tensor, slice_size

log = logging.getLogger(__name__)

_ITEMS = 10_007  # larger than the integers that Python caches: `_Watch` looks for this very object


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What the planner must know of a model, for micro-batches ("slices") of one shape: the bytes of its blocks and of
    its frame, the code outside the blocks.

    `tensors` holds the parameters of each block; `pairs` maps kind of block -> option (way to treat activations) ->
    generated code. `resident_bytes` stay on the device all the time, beside the frame's weights: buffers, some
    scalars, constants of the optimizers. `workspace_bytes` count for each thread that computes, `staged_bytes` for the
    inputs of each slice. `sums_slices`: the model divides its loss by the number of tokens of the whole step, so that
    the losses of the slices add up to the step's loss. `model` and `batch` are what was analysed.
    """

    names: BlockNames
    tensors: tuple[tuple[Tensor, ...], ...]
    local_names: tuple[tuple[str, ...], ...]
    frame_tensors: tuple[Tensor, ...]
    pairs: Mapping[str, Mapping[str, BlockCode]] = field(repr=False)
    frame: FrameBytes
    resident_bytes: int
    workspace_bytes: int
    staged_bytes: int
    slice_tokens: int
    sums_slices: bool
    model: nn.Module = field(repr=False)
    batch: Mapping[str, torch.Tensor] = field(repr=False)
    chunk_rows: int = 0
    lifetimes: tuple[Lifetimes, ...] = ()
    frame_lifetimes: tuple[str, ...] = ()
    change: ChangeBytes = NO_CHANGE
    """What changes of LSP's projectors need between steps."""

    def chain(self, times: Times, distinct_tokens: tuple[int, ...] = ()) -> Chain:
        """The model as the planner sees it: its blocks in order, with their bytes and `times`. Raises KeyError if
        `times` lack a kind or an option. `distinct_tokens[k]`: the most distinct tokens in the first k + 1
        micro-batches of a step; empty if unknown.

        If a layer may run compiled, the chain does not say what is allocated tensor by tensor, so tensors get no fixed
        places in memory: of compiled code only the peak is known.
        """
        placed = not any(its.compiled for its in times.options)
        frame_bytes = sum(t.bytes + t.state_bytes for t in self.frame_tensors)
        return Chain(
            blocks=tuple(self._block(index, times) for index in range(len(self.names.all))),
            frame_bytes=frame_bytes + self.resident_bytes + self.workspace_bytes,
            thread_bytes=self.workspace_bytes,
            staged_bytes=self.staged_bytes,
            start_bytes=self.frame.start,
            between_gpu_bytes=self.change.device,
            between_cpu_bytes=self.change.host,
            replaced_bytes=self.change.replaced,
            slice_tokens=self.slice_tokens,
            distinct_tokens=distinct_tokens,
            frame_tensors=tuple(map(times.of_update, self.frame_tensors)),
            packs=any(t.shared_bytes for tensors in self.tensors for t in tensors) and cpu_kernel().packs,
            lifetimes=self.lifetimes if placed else (),
            frame_lifetimes=self.frame_lifetimes if placed else (),
        )

    @property
    def updates(self) -> tuple[UpdateTimes, ...]:
        """The optimizer steps whose seconds depend on the tensor's size (see `untimed_updates`), without their
        seconds."""
        return untimed_updates((*(t for block in self.tensors for t in block), *self.frame_tensors))

    @property
    def inexact(self) -> tuple[str, ...]:
        """Reasons why results equal those of plain PyTorch only within rounding: gradients are added up in another
        order."""
        reasons = []
        if self.frame.disordered:
            reasons.append("the model's code reads what a block is given before the block does, for a later one")
        users = Counter(t.name for block in self.tensors for t in block if t.trainable)
        if any(count > 1 and not t.row_bytes for block in self.tensors for t in block if (count := users[t.name])):
            reasons.append("with several micro-batches, weights are shared by others than embedding and head")
        if self.frame.spread:
            read = ", ".join(self.frame.spread)
            reasons.append(f"with several micro-batches, the model reads {read} between several blocks")
        return tuple(reasons)

    @property
    def eager(self) -> Mapping[str, str]:
        """Maps each block that runs by its own code, run again in backward, to the reason why it cannot be traced."""
        names_and_kinds = zip(self.names.all, self.names.kinds, strict=True)
        codes = {name: next(iter(self.pairs[kind].values())) for name, kind in names_and_kinds}
        return {name: code.reason for name, code in codes.items() if isinstance(code, EagerPair)}

    @property
    def mixes_slices(self) -> str | None:
        """The name of a block that changes a buffer shared with another block; None if there is none. With several
        micro-batches each block runs all of them before the next block does, so such a buffer would change in another
        order than in plain PyTorch."""
        of_block = [{id(buffer) for buffer in self.model.get_submodule(name).buffers()} for name in self.names.all]
        users = Counter(buffer for buffers in of_block for buffer in buffers)
        for name, kind, buffers in zip(self.names.all, self.names.kinds, of_block, strict=True):
            code = next(iter(self.pairs[kind].values()))
            if isinstance(code, EagerPair) and code.changes_buffers and any(users[buffer] > 1 for buffer in buffers):
                return name
        return None

    def check_slices(self, slices: int) -> None:
        """Raise UserError "buffer-shared" if a step of `slices` micro-batches would not compute what plain PyTorch
        does."""
        if slices > 1 and (name := self.mixes_slices):
            raise UserError(
                f"Block {name} changes a buffer that it shares with another block, or with another run of itself.",
                code="buffer-shared",
                exit_code=Exit.USAGE,
                numbers=(f"{slices} micro-batches, whose changes would come in another order than in plain PyTorch",),
                hint="train with one, larger, batch a step",
            )

    def _block(self, index: int, times: Times) -> Block:
        kind, frame = self.names.kinds[index], self.frame
        pairs = self.pairs[kind]
        pair = next(iter(pairs.values()))
        return Block(
            name=self.names.all[index],
            kind=kind,
            tensors=tuple(map(times.of_update, self.tensors[index])),
            options=tuple(self._option(index, name, times) for name in pairs),
            input_bytes=pair.interface_bytes,
            output_bytes=pair.output_bytes,
            forward_held_bytes=frame.forward_held[index],
            forward_frame_bytes=frame.forward_tail[index],
            backward_held_bytes=frame.backward_held[index],
            backward_frame_bytes=frame.backward_tail[index],
            frame_gradient_bytes=frame.gradients[index],
        )

    def _option(self, index: int, name: str, times: Times) -> Option:
        kind = self.names.kinds[index]
        pair = self.pairs[kind][name]
        layout = self.frame.layouts[index]
        backward = (pair.for_tangents(layout) if layout is not None else pair).backward_peak
        taken = times.of(kind, name)
        is_head = index == len(self.names.all) - 1
        names = dict(zip(self.local_names[index], (t.name for t in self.tensors[index]), strict=True))
        saved = pair.saved_bytes * pair.recipe.offloads
        compiled = taken.compiled or CompiledBytes(forward=0, backward=0, backward_first=0)
        return Option(
            name=name,
            saved_bytes=pair.saved_bytes - saved,
            offloaded_bytes=saved + pair.interface_bytes * pair.recipe.offloads_input,
            forward_s=taken.forward_s,
            backward_s=taken.backward_s,
            issue_forward_s=taken.issue_forward_s,
            issue_backward_s=taken.issue_backward_s,
            forward_peak_bytes=self.frame.head_peak if is_head else max(pair.forward_peak, compiled.forward),
            backward_peak_bytes=max(backward[False], compiled.backward),
            backward_first_peak_bytes=max(backward[True], compiled.backward_first),
            reads_input=pair.keeps_interface,
            reads_weights=tuple(names[local] for local in pair.backward_weights),
            recipe=pair.recipe.text,
            chunk_rows=self.chunk_rows if is_head else 0,
            compiled=taken.compiled is not None,
        )


def analyse(job: Job, device: torch.device, *, arranged: bool = False, for_gpu: bool = False) -> Analysis:
    """Analyse a job's model for its largest micro-batch, without memory for weights. `arranged` and `for_gpu` are
    those of `analyse_model`. Raises UserError."""
    model = skeleton_model(job, device)
    rows = 0 if job.exact else rows_of_a_chunk(cast(Any, model).get_output_embeddings().weight)
    analysis = analyse_model(
        model,
        sample_batch(job, model),
        device=device,
        chunk_rows=rows,
        arranged=arranged,
        for_gpu=for_gpu,
        optimizers=OPTIMIZERS[job.optim].chosen(model),
    )
    if job.method == "lsp":
        analysis = replace(analysis, change=change_bytes(job, model, device, chunk_rows=rows, for_gpu=for_gpu))
    if job.packing is True:
        check_isolation(job, analysis.names)
    check_trainer_options(model, job)
    if job.gradient_accumulation_steps > 1 and not analysis.sums_slices:
        raise UserError(
            f"{job.model} averages its loss within each micro-batch.",
            code="loss-per-slice",
            exit_code=Exit.USAGE,
            numbers=(
                f"gradient_accumulation_steps: {job.gradient_accumulation_steps}",
                "its loss does not use num_items_in_batch, so the step would not be the mean over all its tokens",
            ),
            hint="use gradient_accumulation_steps: 1, with a larger per_device_train_batch_size",
        )
    analysis.check_slices(job.gradient_accumulation_steps)
    return analysis


@trials()
def analyse_model(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    *,
    device: torch.device,
    chunk_rows: int = 0,
    arranged: bool = False,
    optimizers: Mapping[str, AnyOptimizer] = NONE,
    for_gpu: bool = False,
) -> Analysis:
    """Analyse `model` for micro-batches shaped like `batch`: `input_ids` and `labels` [rows, length], or other
    arguments of its forward. Weights may be on any device, also on meta; buffers are on `device`.

    `chunk_rows`: head and loss run in chunks of so many rows; 0: in one piece. `arranged`: also find what each block
    allocates tensor by tensor, so that tensors get fixed places in memory. `optimizers`: parameter name -> optimizer,
    for parameters that AdamW does not train. `for_gpu`: the CPU stands for a GPU that is absent or must not be
    touched. Raises UserError.
    """
    refuse_autocast(device)
    names = find_blocks(model, batch, device=device)
    if chunk_rows:
        check_chunked(model.get_submodule(names.head))
    watch = _Watch(_ITEMS)
    model_kwargs = items_for(model, watch.number)
    joints = trace_blocks(model, names, batch, device, model_kwargs)
    pairs: dict[str, dict[str, BlockCode]] = {}
    for index, kind in enumerate(names.kinds):
        joint = joints[kind]
        if isinstance(joint, EagerPair):
            pairs[kind] = {joint.recipe.name: joint}
        elif kind not in pairs:
            # Embedding and head keep everything: what they save is small, or backward uses it at once.
            is_layer = 0 < index < len(names.kinds) - 1
            recipes = (*RECIPES.values(), *recipes_on_front(joint)) if is_layer else (RECIPES["keep"],)
            pairs[kind] = {**make_pairs(joint, recipes, for_gpu=for_gpu)}
    with watch:
        by_kind = {kind: tuple(by_option.values()) for kind, by_option in pairs.items()}
        frame = measure_frame(model, names, by_kind, batch, device, model_kwargs, chunk_rows=chunk_rows)
        its_frame: tuple[str, ...] = ()
        if arranged:
            names, pairs = one_layout_a_kind(names, pairs, frame.layouts)
            by_kind = {kind: tuple(by_option.values()) for kind, by_option in pairs.items()}
            its_frame = frame_lifetimes(model, names, by_kind, batch, device, model_kwargs, chunk_rows=chunk_rows)
    if device.type == "cuda":
        let_go()  # because rates and free memory are measured next
    first_names = {id(p): name for name, p in model.named_parameters()}
    params = [dict(model.get_submodule(name).named_parameters()) for name in names.all]
    in_blocks = {id(p) for block in params for p in block.values()}
    users = Counter(id(p) for block in params for p in block.values())
    ends = {id(p) for p in params[0].values()} & {id(p) for p in params[-1].values()}
    by_rows = {id(m.weight) for m in model.get_submodule(names.embedding).modules() if isinstance(m, nn.Embedding)}
    tied = {p for p in ends & by_rows if users[p] == 2}
    code = [next(iter(pairs[kind].values())) for kind in names.kinds]
    reached = {id(block[local]) for block, c in zip(params, code, strict=True) for local in c.param_grads}
    still = {id(p) for block in params for p in block.values() if p.requires_grad} - reached

    def described(p: nn.Parameter, *, trained: bool, tied: bool = False) -> Tensor:
        return describe(first_names[id(p)], p, tied=tied, trained=trained, optimizers=optimizers)

    analysis = Analysis(
        names=names,
        tensors=tuple(
            tuple(
                described(p, tied=id(p) in tied, trained=p.requires_grad and id(p) not in still) for p in block.values()
            )
            for block in params
        ),
        local_names=tuple(tuple(block) for block in params),
        frame_tensors=tuple(
            described(p, trained=p.requires_grad) for p in model.parameters() if id(p) not in in_blocks
        ),
        pairs=pairs,
        frame=frame,
        resident_bytes=buffer_bytes(model)
        + scalar_bytes(device)
        + max((optimizer.resident_bytes for optimizer in optimizers.values()), default=0),
        workspace_bytes=workspace_bytes(device),
        staged_bytes=staged_bytes(batch) if device.type == "cuda" else 0,
        slice_tokens=slice_size({name: t.shape for name, t in batch.items()}),
        sums_slices=watch.seen,
        model=model,
        batch=batch,
        chunk_rows=chunk_rows,
        lifetimes=block_lifetimes(names, pairs, frame.layouts) if arranged else (),
        frame_lifetimes=its_frame,
    )
    if analysis.eager:
        first, reason = next(iter(analysis.eager.items()))
        more = f" and {len(analysis.eager) - 1} more" if len(analysis.eager) > 1 else ""
        log.warning("model: %s%s run by their own code, recomputed in backward (option eager). %s", first, more, reason)
    if analysis.inexact:
        log.info("model: results equal plain PyTorch's within rounding, because %s", "; ".join(analysis.inexact))
    if still:
        names_of = sorted(first_names[i] for i in still)
        log.warning("model: no gradient reaches %s: it stays as it is, as in plain PyTorch", ", ".join(names_of))
    return analysis


def measure_times(
    analysis: Analysis, device: torch.device, hardware: Hardware, *, slices: int, compiling: bool = False
) -> Times:
    """Measure on `device` the seconds of each kind of block and option, for steps of `slices` micro-batches in all.
    `compiling`: take the times of compiled layers where these are faster."""
    estimate, names = estimate_times(analysis, hardware), analysis.names
    *_, head = names.kinds
    adds, pairs = slices > 1, analysis.pairs
    blocks = measure_pairs({k: v for k, v in pairs.items() if k != head}, device, estimate, adds=adds)
    first = {kind: next(iter(by_option.values())) for kind, by_option in pairs.items()}
    alone = rehearsal(
        analysis.model,
        names,
        first,
        analysis.batch,
        device,
        chunk_rows=analysis.chunk_rows,
        sink=sums() if adds else forget,
    )
    head_times = measure_rest(estimate.of(head, first[head].recipe.name), alone, device, names.head)
    updates = measure_updates(analysis.updates, device, hardware)
    times = Times(options=(*blocks, head_times), device=device_name(device), measured=True, updates=updates)
    layers = dict.fromkeys(kind for kind in names.kinds[1:-1] if kind not in (names.kinds[0], head))
    return with_compiled(pairs, layers, times, device, adds=adds) if compiling else times


def estimate_times(analysis: Analysis, hardware: Hardware) -> Times:
    """Estimate the seconds of each kind of block and option from its arithmetic, its memory traffic and the rates of
    `hardware`."""
    times = estimate_pairs(analysis.pairs, analysis.names.kinds[-1], hardware)
    return replace(times, updates=estimate_updates(analysis.updates, hardware))


class _Watch(TorchFunctionMode):
    """Sees whether the very object `number` is an operand of a tensor operation. A model may accept an argument and
    ignore it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.seen = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen |= any(value is self.number for value in (*args, *(kwargs or {}).values()))
        return function(*args, **(kwargs or {}))


# ---- describes a model's parameters and buffers for the planner: their bytes, and the bytes of optimizer states


def describe(
    name: str, p: nn.Parameter, *, trained: bool, tied: bool = False, optimizers: Mapping[str, AnyOptimizer] = NONE
) -> Tensor:
    """Describe the parameter `p` called `name` for the planner. For a weight packed in 4 or 8 bits, the number of
    elements is that of the unpacked weight, its attribute `holds`. For a trained weight narrower than fp32, the
    optimizer's states include a master copy in fp32. `tied`: the weight is the embedding's and the head's.
    `optimizers`: parameter name -> optimizer, for parameters that AdamW does not train."""
    count, size = p.numel(), p.element_size()
    optimizer = optimizers.get(name, ADAMW) if trained else ADAMW
    master = 0 if p.dtype == torch.float32 else 4 * count
    return Tensor(
        name=name,
        elements=getattr(p, "holds", count),
        bytes=count * size,
        gradient_bytes=count * size * trained,
        state_bytes=(sum(optimizer.moment_bytes(count)) + master) * trained,
        trainable=trained,
        optimizer=optimizer,
        row_bytes=p.shape[-1] * size if tied and trained else 0,
    )


def buffer_bytes(model: nn.Module) -> int:
    """The bytes of all buffers of the model; a shared buffer counts once."""
    storages = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in model.buffers()}
    return sum(storages.values())
