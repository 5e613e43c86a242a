"""Sets environment variables that are read only once: when torch is loaded, or when CUDA is initialized."""

from __future__ import annotations

import os


def number_cards_by_slot() -> None:
    """Let CUDA number graphics cards by slot, as nvidia-smi does, unless the user has set an order. By default CUDA's
    first card is the fastest one, but nvidia-smi, which is asked for memory before CUDA is initialized, lists the card
    in the first slot first."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def before_torch() -> None:
    """Set the environment variables that a process that computes needs before it loads torch."""
    # Threads of several slices alternate: spinning while they wait would take the processor from the working one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    number_cards_by_slot()
