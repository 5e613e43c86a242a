"""AdamW's moments in 8 bits: which tensors have them, and what they take. Light: no torch.

A moment is one tensor of bytes: an fp32 scale for each 256 elements, then a byte for each element. See
`planner.cpu.rounded` for what they mean.
"""

from __future__ import annotations

BLOCK = 256
"""Elements that share a scale."""
LEAST_ELEMENTS = 4096
"""Smaller tensors keep fp32 moments, as in bitsandbytes; in transformers' Trainer embeddings do, too."""
CHUNK = 4 * 2**20
"""Elements that an update on the device takes at once."""
NUMBERS_BYTES = 4 * 1024
"""What the numbers that bytes stand for, and what lies halfway between them, take on the device; of both moments."""
_SCRATCH = 4  # fp32 numbers of each element: gradient, moments, and the numbers' places


def scale_count(elements: int) -> int:
    """Scales of a moment."""
    return -(-elements // BLOCK)


def moment_bytes(elements: int) -> int:
    """What one moment of a tensor takes."""
    return 4 * scale_count(elements) + elements


def scratch_bytes(elements: int) -> int:
    """What an update on the device needs beside the tensor's items."""
    most = min(elements, CHUNK)
    return 4 * (_SCRATCH * most + scale_count(most))
