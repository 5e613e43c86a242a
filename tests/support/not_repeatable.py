"""A Llama with an operation that has no deterministic kernel, on the CPU either."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP


def patch_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each MLP of a Llama write its first number where it stands: nothing changes but who does it."""
    own = LlamaMLP.forward

    def forward(self: LlamaMLP, x: Tensor) -> Tensor:
        found = own(self, x)
        return found.put(torch.zeros(1, dtype=torch.int64, device=x.device), found.flatten()[:1])

    monkeypatch.setattr(LlamaMLP, "forward", forward)
