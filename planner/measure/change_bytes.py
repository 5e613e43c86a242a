"""Measures the bytes that a change of LSP's projectors needs between two steps (`worker.engine.full_gradients`).

It goes through the model forward and backward with all sampled rows in slices, and makes the full gradients of one
block at a time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import nn

from planner.errors import Exit, UserError
from planner.graph import RECIPES, BlockCode, EagerPair, find_blocks, items_for, make_pairs
from planner.job.schema import Job
from planner.measure.forward_bytes import eval_mode
from planner.measure.frame_bytes import FrameBytes, measure_frame, trace_blocks
from planner.measure.gpu_card import workspace_bytes
from planner.models.hf_model import sample_batch
from planner.models.lsp import LinearWithCore, change_scratch_bytes, layers_with_cores, requiring_gradients

_ITEMS = 10_007
_STATES = 12
"""Bytes of a core's master and moments, of which a change keeps a copy on the host, per number."""


@dataclass(frozen=True, slots=True)
class ChangeBytes:
    """What a change of projectors needs beside what is there between steps: bytes on the device and on the host.
    `replaced`: the bytes of the frozen weights that it replaces."""

    device: int = 0
    host: int = 0
    replaced: int = 0


NO_CHANGE = ChangeBytes()


def change_bytes(
    job: Job, model: nn.Module, device: torch.device, *, chunk_rows: int = 0, for_gpu: bool = False
) -> ChangeBytes:
    """The bytes that changes of projectors need in the job's `model`, whose weights may be on meta. `chunk_rows`: the
    head computes its loss in chunks of so many rows; 0: in one piece. `for_gpu`: the CPU stands for a GPU. Raises
    UserError."""
    layers = dict(layers_with_cores(model))
    with eval_mode(model), requiring_gradients(model, {f"{name}.weight" for name in layers}), torch.enable_grad():
        batch = sample_batch(job.model_copy(update={"per_device_train_batch_size": job.lsp_slice_rows}), model)
        names = find_blocks(model, batch, device=device)
        model_kwargs = items_for(model, _ITEMS)
        codes: dict[str, BlockCode] = {}
        for kind, joint in trace_blocks(model, names, batch, device, model_kwargs).items():
            inner = kind in names.kinds[1:-1]
            recipe = RECIPES["recompute" if inner else "keep"]
            codes[kind] = (
                joint if isinstance(joint, EagerPair) else make_pairs(joint, (recipe,), for_gpu=for_gpu)[recipe.name]
            )
        pairs = {kind: (code,) for kind, code in codes.items()}
        frame = measure_frame(model, names, pairs, batch, device, model_kwargs, chunk_rows=chunk_rows)
    blocks = [model.get_submodule(name) for name in names.all]
    in_blocks = {id(module) for block in blocks for module in block.modules()}
    if outside := [name for name, layer in layers.items() if id(layer) not in in_blocks]:
        raise UserError(
            f"{outside[0]} is a linear layer outside of the model's layers, where no core can be.",
            code="lsp-no-layer",
            exit_code=Exit.USAGE,
            hint=f"trainable: [{outside[0]}] trains it whole; or method: lora",
        )
    needs = [
        _block_bytes(index, block, codes[kind], frame, job)
        for index, (block, kind) in enumerate(zip(blocks, names.kinds, strict=True))
    ]
    inputs = (len(names.kinds) - 1) * max(code.interface_bytes for code in codes.values())
    cores = sum(layer.core.numel() for layer in layers.values())
    replaced = sum(p.nbytes for layer in layers.values() for p in layer.parameters() if not p.requires_grad)
    threads = (_slices(job) - 1) * workspace_bytes(device)
    host = _slices(job) * inputs + _STATES * cores
    return ChangeBytes(device=max(needs) + threads, host=host, replaced=replaced)


def _block_bytes(index: int, block: nn.Module, code: BlockCode, frame: FrameBytes, job: Job) -> int:
    """The most bytes that are on the device while one block runs all rows, forward and backward: its weights, what rows
    hold between blocks, what the block needs, the sums of its gradients, and what new projectors need."""
    weights = sum(p.nbytes for p in {id(p): p for p in block.parameters()}.values())
    layers = [layer for _, layer in layers_with_cores(block)]
    sizes = sorted((4 * layer.weight.numel(), _scratch(layer, job)) for layer in layers)
    sums = sum(size for size, _ in sizes)
    gone = itertools.accumulate((size for size, _ in sizes), initial=0)  # small gradients are done with first
    changing = max((sums - done + scratch for done, (_, scratch) in zip(gone, sizes, strict=False)), default=0)
    others = (_slices(job) - 1) * max(_around(frame.forward_held, index), _around(frame.backward_held, index))
    if index == len(frame.forward_held) - 1:
        running = frame.head_peak
    else:
        forward = frame.forward_held[index] + code.forward_peak + frame.forward_tail[index]
        backward = frame.backward_held[index] + max(code.backward_peak.values()) + frame.backward_tail[index]
        running = max(forward, backward) + code.interface_bytes
    return weights + others + max(sums + running, changing) + frame.start


def _slices(job: Job) -> int:
    return -(-job.lsp_rows // job.lsp_slice_rows)


def _around(held: tuple[int, ...], index: int) -> int:
    """The most that a row holds as it begins this block or one of its neighbours."""
    return max(held[max(0, index - 1) : index + 2])


def _scratch(layer: LinearWithCore, job: Job) -> int:
    rows, columns = layer.weight.shape
    return change_scratch_bytes(rows, columns, layer.shape, fit_steps=job.lsp_fit_steps)
