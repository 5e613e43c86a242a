"""Says which tensors have AdamW moments in 8 bits, and how many bytes these take. It does not import torch.

A moment is one tensor of bytes: an fp32 scale for each 256 elements, then a byte for each element.
`planner.cpu.rounded` says what they mean.
"""

from __future__ import annotations

BLOCK = 256
"""Elements that share a scale."""
LEAST_ELEMENTS = 4096
"""Smaller tensors keep fp32 moments, as in bitsandbytes; in transformers' Trainer embeddings do, too."""
CHUNK = 4 * 2**20
"""Most elements that an update on the device handles at once."""
NUMBERS_BYTES = 4 * 1024
"""Bytes on the device of the numbers that bytes stand for and of the points halfway between them, for both moments."""
_SCRATCH = 4  # values of 4 bytes for each element: gradient, two moments, place of the number


def scale_count(elements: int) -> int:
    """The number of scales of a moment."""
    return -(-elements // BLOCK)


def moment_bytes(elements: int) -> int:
    """Bytes of one moment of a tensor."""
    return 4 * scale_count(elements) + elements


def scratch_bytes(elements: int) -> int:
    """Bytes that an update on the device needs beside the tensor's items."""
    most = min(elements, CHUNK)
    return 4 * (_SCRATCH * most + scale_count(most))
