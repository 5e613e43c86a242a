"""Derives random seeds from the place where they are used, so that they are the same in every process, on every
machine, and after a resume."""

from __future__ import annotations

import hashlib
import struct


def micro_batch_seed(seed: int, step: int, slice: int) -> int:
    """The random seed under which micro-batch number `slice` of step `step` runs: a number of 63 bits, the same in all
    versions of Python and torch."""
    return _hash(b"slice", seed, step, slice)


def epoch_seed(seed: int, epoch: int) -> int:
    """The random seed that determines the order of the rows in epoch `epoch`."""
    return _hash(b"epoch", seed, epoch)


def split_seed(seed: int) -> int:
    """The random seed that determines which rows are held out for evaluation."""
    return _hash(b"split", seed)


def _hash(purpose: bytes, *numbers: int) -> int:
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little") >> 1
