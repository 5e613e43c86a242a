"""A model's parameters and buffers in a plan's words: their bytes, and those of the optimizer's states."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from planner.eight_bits import LEAST_ELEMENTS, moment_bytes
from planner.schedule.chain import Tensor


def rounded_names(model: nn.Module) -> frozenset[str]:
    """Names of parameters whose moments are in 8 bits where a job asks for it: as in bitsandbytes not of small ones, as
    in transformers' Trainer not of embeddings."""
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return frozenset(
        name for name, p in model.named_parameters() if p.numel() >= LEAST_ELEMENTS and id(p) not in embedded
    )


def matrix_names(model: nn.Module) -> frozenset[str]:
    """Names of parameters that Muon trains where a job asks for it: matrices but those of embeddings and of the head,
    told by what they are and, as in LLaMA-Factory and axolotl, by name."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    apart = {id(p) for module in outer for p in module.parameters()}
    return frozenset(
        name
        for name, p in model.named_parameters()
        if p.dim() == 2 and id(p) not in apart and not any(word in name for word in ("embed", "lm_head"))
    )


def describe(
    name: str, p: nn.Parameter, *, trained: bool, tied: bool = False, rounded: Collection[str] = (),
    matrices: Collection[str] = (),
) -> Tensor:  # fmt: skip
    """The parameter `p` called `name`; a packed one (`planner.measure.quantized`) has as many elements as it `holds`.
    Moments take 8 bytes per element, or in 8 bits a quarter; where the working copy is narrower than fp32 there is a
    master too. `matrices`: those of which Muon keeps a momentum in place of moments."""
    count, size = p.numel(), p.element_size()
    side = min(p.shape) if trained and name in matrices else 0
    moments = 2 * moment_bytes(count) if trained and name in rounded else (4 if side else 8) * count
    master = 0 if p.dtype == torch.float32 else 4 * count
    return Tensor(
        name=name,
        elements=getattr(p, "holds", count),
        bytes=count * size,
        gradient_bytes=count * size * trained,
        state_bytes=(moments + master) * trained,
        trainable=trained,
        rounded=trained and name in rounded,
        shorter_side=side,
        row_bytes=p.shape[-1] * size if tied and trained else 0,
    )


def buffer_bytes(model: nn.Module) -> int:
    """Of all buffers, each once."""
    storages = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in model.buffers()}
    return sum(storages.values())
