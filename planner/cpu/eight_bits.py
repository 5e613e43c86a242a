"""Says how many bytes AdamW's moments in 8 bits take, and which tensors have them. This module does not import torch.

A moment is one tensor of bytes: an fp32 scale for each 256 elements, then one byte per element. `planner.cpu.rounded`
says what the bytes mean.
"""

from __future__ import annotations

BLOCK = 256
"""Number of elements that share a scale."""
LEAST_ELEMENTS = 4096
"""Tensors with fewer elements keep fp32 moments, as in bitsandbytes. In transformers' Trainer embeddings do, too."""
CHUNK = 4 * 2**20
"""The most elements that an optimizer step on the device handles at once."""
NUMBERS_BYTES = 4 * 1024
"""Device bytes of the tables for both moments: the 256 numbers that bytes stand for, and the points halfway between
them."""
_SCRATCH = 4  # values of 4 bytes for each element: gradient, two moments, place of the number


def scale_count(elements: int) -> int:
    """The number of fp32 scales in one moment of a tensor with `elements` elements."""
    return -(-elements // BLOCK)


def moment_bytes(elements: int) -> int:
    """The bytes of one 8-bit moment of a tensor with `elements` elements: its scales, then one byte per element."""
    return 4 * scale_count(elements) + elements


def scratch_bytes(elements: int) -> int:
    """The bytes of temporary memory that an optimizer step on the device needs for a tensor with `elements` elements
    and 8-bit moments."""
    most = min(elements, CHUNK)
    return 4 * (_SCRATCH * most + scale_count(most))
