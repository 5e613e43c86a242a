"""Variables of a process that are read once: when torch is loaded, or when CUDA begins."""

from __future__ import annotations

import os


def number_cards_by_slot() -> None:
    """CUDA's cards have the numbers that the driver's tools give them, where nobody has said otherwise: else its first
    is the fastest, and nvidia-smi, which is asked for memory before CUDA begins, tells of the one in the first slot."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def before_torch() -> None:
    """What a process that computes needs before it loads torch."""
    # Threads of several slices take turns; spinning while they wait would take the processor from the one that works.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    number_cards_by_slot()
