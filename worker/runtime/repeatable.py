"""Kernels that give the same bits each time, where PyTorch has them beside faster ones."""

from __future__ import annotations

import torch
from torch.utils import deterministic


def take_repeatable_kernels() -> None:
    """Have PyTorch take, in this process, the kernels that add in one order. Where an operation has none it warns.

    On a CPU these cost little, so training takes them, too: without them the gradient of an indexed tensor, such as the
    biases of GPT-OSS's experts, is added up by several threads in any order. On CUDA they cost more: there only what
    compares bits takes them.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else PyTorch fills all memory first, against code that reads what was never written.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
