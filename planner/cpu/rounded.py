"""Stores AdamW's moments in 8 bits and expands them to fp32, in blocks of 256 elements: the method of Dettmers et al.
(2022), section 2, with the numbers, block size and exceptions of bitsandbytes' AdamW8bit.

An optimizer step expands a block's moments to fp32, does what AdamW(fused=True) does with fp32 moments, and rounds
them again: each moment is divided by the largest absolute value of its block, which is kept as the scale, and becomes
the nearest of 256 numbers. The master is never rounded. This file uses PyTorch's operations, for any device; adamw.c
does the same, bit for bit, in one pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.cpu.eight_bits import BLOCK, moment_bytes, scale_count, scratch_bytes

_LEAST = 1e-38  # least divisor: a block of zeros has the scale 0


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """The 256 numbers that a byte stands for, ascending (`values` [256]), and the points halfway between neighbours
    (`halfway` [255]). A value up to and including a halfway point is rounded to the lower neighbour."""

    values: Tensor
    halfway: Tensor

    def on(self, place: Callable[[Tensor], Tensor]) -> Numbers:
        """A copy of these numbers with each tensor put on a device by `place`."""
        return Numbers(place(self.values), place(self.halfway))


_FIRST_CELL, CELLS = 103 << 7, 25 << 7  # cells are named by the upper 16 bits of a float: from 2^-24 to below 2


@functools.cache
def table(*, signed: bool) -> Tensor:
    """The table in which adamw.c looks up numbers (`struct numbers` there), as bytes: the 256 values, the halfway
    points, and for each cell the index of the number to which the cell's least float is rounded. A cell is the set of
    floats that share their upper 16 bits; cells of positive floats come first, then negative ones. A cell has at most
    one halfway point in it, so one more comparison gives the index. `signed`: for the first moment."""
    known = numbers(signed=signed)
    ends = (torch.arange(_FIRST_CELL, _FIRST_CELL + CELLS + 1, dtype=torch.int32) << 16).view(torch.float32)
    ends[0] = 0.0  # the first cell has all smaller floats, too
    above = torch.nextafter(ends[1:], torch.zeros(()))
    least = torch.cat([ends[:-1], -above])
    greatest = torch.cat([above, -ends[:-1]])
    places, others = (torch.bucketize(each, known.halfway) for each in (least, greatest))
    assert bool((others - places <= 1).all())
    halfway = torch.cat([known.halfway, torch.tensor([torch.inf])])
    return torch.cat([known.values.view(torch.uint8), halfway.view(torch.uint8), places.to(torch.uint8)])


@functools.cache
def numbers(*, signed: bool) -> Numbers:
    """The 256 numbers that a byte of the first moment (`signed`) stands for, or of the second, which is never
    negative; in host memory. They are 0, 1 and seven decades, each ten times the one below and divided twice as finely
    (Dettmers et al. 2022, section 1.3)."""
    points = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2
        points += (10 ** (decade - 6) * middles).tolist()
        points += (-(10 ** (decade - 6)) * middles).tolist() if signed else []
    values = torch.tensor(sorted(points), dtype=torch.float32)
    return Numbers(values, (values[:-1] + values[1:]) / 2)


def both_numbers(place: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> tuple[Numbers, Numbers]:
    """The 256 numbers that a byte stands for, in the first moment and in the second, with each tensor put on a device
    by `place`."""
    return numbers(signed=True).on(place), numbers(signed=False).on(place)


def split(moment: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """The two parts of an 8-bit moment of a tensor with `elements` elements, as views: its scales (fp32, one per 256
    elements) and its bytes [elements]."""
    assert moment.dtype == torch.uint8 and moment.numel() == moment_bytes(elements), moment.shape
    start = 4 * scale_count(elements)
    return moment[:start].view(torch.float32), moment[start:]


def expand(scales: Tensor, places: Tensor, *, signed: bool) -> Tensor:
    """An 8-bit moment as fp32 numbers [elements], in host memory. `scales`: one fp32 scale per 256 elements; `places`:
    its bytes [elements], indices of the numbers. `signed`: it is the first moment."""
    moment = torch.empty(places.shape)
    _expand(places, scales, numbers(signed=signed), moment, torch.empty_like(moment, dtype=torch.int32))
    return moment


def rounded(wide: Tensor, *, signed: bool) -> Tensor:
    """The fp32 moment `wide` rounded to 8 bits and expanded to fp32 again, in the same shape. `signed`: it is the
    first moment."""
    known = numbers(signed=signed).on(lambda tensor: tensor.to(wide.device))
    scales, places = _places(wide, known)
    return (known.values[places] * scales).view(-1)[: wide.numel()].view(wide.shape)


def contract(wide: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The fp32 moment `wide` rounded to 8 bits: its scales (fp32, one per 256 elements) and its bytes, in the shape of
    `wide`; the reverse of `expand`. `signed`: it is the first moment."""
    scales, places = _places(wide, numbers(signed=signed).on(lambda tensor: tensor.to(wide.device)))
    return scales.view(-1), places.view(-1)[: wide.numel()].view(wide.shape).to(torch.uint8)


def _places(wide: Tensor, known: Numbers) -> tuple[Tensor, Tensor]:
    """The scales of the moment's blocks of 256 elements, as a column, and the indices of its numbers, a row a block;
    the last block is filled up with zeros."""
    flat = wide.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    return scales, torch.bucketize(blocks * scales.clamp(min=_LEAST).reciprocal(), known.halfway)


class Scratch:
    """Temporary memory on `device` for an optimizer step on up to `elements` elements at a time, allocated as one
    tensor."""

    def __init__(self, elements: int, device: torch.device) -> None:
        whole = torch.empty(scratch_bytes(elements), dtype=torch.uint8, device=device).view(torch.float32)
        self.gradient, self.exp_avg, self.exp_avg_sq, places = whole[: 4 * elements].view(4, elements)
        self.places, self.inverse = places.view(torch.int32), whole[4 * elements :]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Some consecutive blocks (of 256 elements) of a tensor for an optimizer step: gradient and moments as flat fp32
    tensors. `store` rounds the moments to 8 bits again. `span`: which elements of the tensor they are."""

    span: slice
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    _stored: tuple[tuple[Tensor, Tensor, Numbers], ...]
    _scratch: Scratch

    @classmethod
    def load(
        cls,
        moments: tuple[Tensor, Tensor],
        known: tuple[Numbers, Numbers],
        gradient: Tensor,
        start: int,
        scratch: Scratch,
    ) -> Chunk:
        """Expand the moments of the next elements of a tensor, from `start` (a multiple of 256) on: up to the tensor's
        end, or as many as `scratch` holds. `gradient`: the whole tensor's gradient, flat. `moments`: its two 8-bit
        moments. `known`: the numbers that their bytes stand for."""
        stop = min(start + scratch.gradient.numel(), gradient.numel())
        blocks, count, stored = slice(start // BLOCK, scale_count(stop)), stop - start, []
        wide = [part[:count] for part in (scratch.gradient, scratch.exp_avg, scratch.exp_avg_sq)]
        for moment, its_numbers, its_wide in zip(moments, known, wide[1:], strict=True):
            scales, places = split(moment, gradient.numel())
            stored.append((places[start:stop], scales[blocks], its_numbers))
            _expand(*stored[-1], its_wide, scratch.places[:count])
        wide[0].copy_(gradient[start:stop])
        return cls(slice(start, stop), wide[0], wide[1], wide[2], tuple(stored), scratch)

    def store(self) -> None:
        """Round the moments to 8 bits and write them into the tensor's stored moments. Overwrites `gradient`."""
        for wide, (places, scales, known) in zip((self.exp_avg, self.exp_avg_sq), self._stored, strict=True):
            _round(wide, places, scales, known, self._scratch)


def _expand(places: Tensor, scales: Tensor, known: Numbers, wide: Tensor, its_places: Tensor) -> None:
    its_places.copy_(places)
    torch.index_select(known.values, 0, its_places, out=wide)
    for part, scale in zip(_blocks(wide), _of_blocks(scales, wide), strict=True):
        part.mul_(scale)


def _round(wide: Tensor, places: Tensor, scales: Tensor, known: Numbers, scratch: Scratch) -> None:
    """Round `wide` to 8 bits: write its bytes to `places` and its scales to `scales`. Overwrites `scratch.gradient`."""
    scaled, inverse = scratch.gradient[: wide.numel()], scratch.inverse[: scales.numel()]
    torch.abs(wide, out=scaled)
    for part, scale in zip(_blocks(scaled), _of_blocks(scales, wide), strict=True):
        torch.amax(part, 1, keepdim=True, out=scale)
    torch.clamp(scales, min=_LEAST, out=inverse).reciprocal_()
    for part, by, to in zip(_blocks(wide), _of_blocks(inverse, wide), _blocks(scaled), strict=True):
        torch.mul(part, by, out=to)
    nearest = scratch.places[: wide.numel()]
    torch.bucketize(scaled, known.halfway, out_int32=True, out=nearest)
    places.copy_(nearest)


def _blocks(flat: Tensor) -> list[Tensor]:
    """The whole blocks of 256 elements as rows of one tensor, and the rest as one row of another; empty ones are left
    out."""
    whole = flat.numel() // BLOCK * BLOCK
    parts = [flat[:whole].view(-1, BLOCK), flat[whole:].view(1, -1)]
    return [part for part in parts if part.numel()]


def _of_blocks(scales: Tensor, flat: Tensor) -> list[Tensor]:
    """The scales as columns, one tensor for each that `_blocks` returns for `flat`."""
    whole = flat.numel() // BLOCK
    return [part.view(-1, 1) for part in (scales[:whole], scales[whole:]) if part.numel()]
