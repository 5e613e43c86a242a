"""Names sections of code in profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def label(text: str) -> AbstractContextManager[object]:
    """A context that appears as a section named `text` in a torch profile (in NVTX ranges too, under
    `torch.autograd.profiler.emit_nvtx`). If no profile is taken, it costs 0.1 µs, a hundredth of what
    `torch.profiler.record_function` costs."""
    return torch._C._profiler._RecordFunctionFast(text)
