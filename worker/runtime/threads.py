"""Gives a new thread the number of OpenMP threads that the rest of the process computes with."""

from __future__ import annotations

import torch


def compute_with(threads: int) -> None:
    """Let PyTorch's operations in this thread use `threads` OpenMP threads.

    Nothing is set where it is so already. `torch.set_num_threads` also turns off MKL's choice of its own number of
    threads, for the whole process and for good. Matrix products inside attention's backward then have other last bits
    than in a process that never calls it, such as one that trains in plain PyTorch.
    """
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
