"""Asks NVIDIA's management library (NVML) which GPU jobs use, and how much energy the GPU has used."""

from __future__ import annotations

import os
from typing import Any


def device(nvml: Any) -> Any:
    """The NVML handle of the first GPU that jobs may use. `nvml`: the initialized module pynvml. Raises its
    `NVMLError`."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if named.isdigit() or not named:
        return nvml.nvmlDeviceGetHandleByIndex(int(named or 0))
    return nvml.nvmlDeviceGetHandleByUUID(named)


def energy_joules() -> float | None:
    """The energy, in joules, that the GPU of the jobs has used since its driver was loaded, whichever program used it.
    None where it is not known: without the package nvidia-ml-py, without a card, and with a card from before Volta,
    which has no such counter."""
    try:
        import pynvml  # late: an extra
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(device(pynvml))) / 1000
    except pynvml.NVMLError:
        return None


def energy_since(before: float | None) -> float | None:
    """The energy, in joules, that the GPU has used since `energy_joules` returned `before`; None where either value is
    not known, or the counter was reset."""
    now = energy_joules()
    return None if before is None or now is None or now < before else now - before
