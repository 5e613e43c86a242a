"""Names sections of code in profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def label(text: str) -> AbstractContextManager[object]:
    """Inside, a torch profile shows `text` (in NVTX ranges too, under `torch.autograd.profiler.emit_nvtx`). Where no
    profile is taken it costs 0.1 µs, a hundredth of what `torch.profiler.record_function` takes."""
    return torch._C._profiler._RecordFunctionFast(text)
