"""A causal language model that takes next to no time on the emulated device: few operations a layer."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.tiny_models import VOCABULARY

WIDTH = 16


class Layer(nn.Module):
    """One weight, and results of its own that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.core(x))


class Model(nn.Module):
    """Embedding, three layers, head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.to(dtype).train()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        near = self.head(x)[:, :-1].float().flatten(0, 1)
        losses = F.cross_entropy(near, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum")
        count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return types.SimpleNamespace(loss=losses / count)
