"""The model of a case: plain PyTorch, as anyone might write it."""

from __future__ import annotations

import random
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.fuzz.case import Case
from tests.support.operations import Part

LONGEST = 64


class Layer(nn.Module):
    """A layer with work of its own, and then parts."""

    def __init__(self, names: tuple[str, ...], case: Case) -> None:
        super().__init__()
        self.core = nn.Linear(case.width, case.width)
        self.parts = nn.ModuleList(Part(name, case.width) for name in names)
        self.has = case.features

    def forward(self, x: Tensor, mask: Any = None, first: Any = None, tables: Any = None) -> Any:
        if "turned" in self.has:
            x = x.transpose(0, 1)
        if first is not None:
            x = x + 0.1 * first
        if tables is not None:
            scale, shift = tables
            x = x * scale + shift
        dtype = self.core.weight.dtype
        x = x + torch.tanh(self.core(x.to(dtype)))
        for part in self.parts:
            x = part(x.to(dtype)).to(x.dtype)
        if mask is not None:
            x = x * mask
        made = x.transpose(0, 1) if "turned" in self.has else x
        second = x.float().pow(2).mean() if "second result" in self.has else None
        if "named results" in self.has:
            return {"x": made} if second is None else {"second": second, "x": made}
        return made if second is None else (made, second)


class OtherLayer(Layer):
    """Of another class."""


class Embedding(nn.Module):
    """Of tokens, and of positions."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(LONGEST, width)

    @property
    def weight(self) -> nn.Parameter:
        return self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class Model(nn.Module):
    """A frame around embedding, layers and head, with what `case.features` names."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width, self.case, self.has = case.width, case, case.features
        two_tables = "two tables" in self.has
        self.embedding = (Embedding if two_tables else nn.Embedding)(case.vocabulary, width)
        chance, layers = random.Random(case.seed), []
        for number in range(case.layers):
            names = case.patterns[number % len(case.patterns)]
            if "varied" in self.has and names:
                names = names[: chance.randint(1, len(names))]
            other = "two classes" in self.has and case.layers > 3 and number % 2
            layers.append((OtherLayer if other else Layer)(names, case))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, case.vocabulary, bias="head bias" in self.has)
        if "final norm" in self.has:
            self.norm = nn.LayerNorm(width)
        if "own scale" in self.has:
            self.scale = nn.Parameter(torch.linspace(0.9, 1.1, width))
        if "positions" in self.has:
            self.positions = nn.Parameter(0.02 * torch.randn(LONGEST, width))
        if "layers tables" in self.has:
            self.tables = nn.Parameter(0.02 * torch.randn(2, width))
        if "tied" in self.has:
            self.head.weight = self.embedding.weight
        if "shared weight" in self.has:
            self.layers[-1].core.weight = self.layers[0].core.weight
        self._freeze()

    def _freeze(self) -> None:
        match self.case.frozen:
            case "embedding":
                self.embedding.requires_grad_(False)
            case "below":
                self.embedding.requires_grad_(False)
                self.layers[0].requires_grad_(False)
            case "middle":
                self.layers[1].requires_grad_(False)
            case "head":
                self.head.requires_grad_(False)
            case "all but biases":
                for name, parameter in self.named_parameters():
                    parameter.requires_grad_(parameter.requires_grad and (name.endswith("bias") or "core" in name))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        weights: Tensor | None = None,
        num_items_in_batch: Any = None,
    ) -> Any:
        with torch.autocast(input_ids.device.type, torch.bfloat16, enabled="autocast" in self.has):
            logits, seconds, hidden = self._logits(input_ids, attention_mask)
        near, wanted = logits[:, :-1].float(), labels[:, 1:].reshape(-1)
        losses = F.cross_entropy(near.flatten(0, 1), wanted, ignore_index=-100, reduction="none")
        if weights is not None:
            losses = losses * weights[:, 1:].reshape(-1)
        if "z loss" in self.has:
            losses = losses + 1e-3 * near.logsumexp(-1).flatten() ** 2
        count = (wanted != -100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = losses.sum() / count
        if seconds:
            loss = loss + 0.01 * torch.stack(seconds).sum()
        return types.SimpleNamespace(loss=loss, logits=logits, hidden=hidden if "hidden states" in self.has else None)

    def _logits(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        has = self.has
        x = self.embedding(ids)
        if "positions" in has:
            x = x + self.positions[: x.shape[1]]
        if "wide" in has:
            x = x.float()
        if "dropout" in has:
            x = F.dropout(x, 0.1, self.training)
        given: dict[str, Any] = {}
        if "layers mask" in has and mask is not None:
            given["mask"] = mask[..., None].to(x.dtype)
        if "layers first" in has:
            given["first"] = x
        if "layers first, detached" in has:
            given["first"] = x.detach()
        if "layers tables" in has:
            given["tables"] = (1 + self.tables[0], self.tables[1])
        seconds, hidden = [], [x]
        for layer in [*self.layers] * (2 if "again" in has else 1):
            made = layer(x.transpose(0, 1) if "turned" in has else x, **given)
            if isinstance(made, dict):
                made = (made["x"], made["second"]) if "second" in made else made["x"]
            if "second result" in has:
                made, second = made
                seconds.append(second)
            y = made.transpose(0, 1) if "turned" in has else made
            if "factor" in has:
                y = y * 0.9
            if "own scale" in has:
                y = y * self.scale
            if "noise" in has:
                y = y + 0.01 * torch.randn_like(y)
            x = x + y if "residual" in has else y
            hidden.append(x)
        if "final norm" in has:
            x = self.norm(x.to(self.norm.weight.dtype))
        logits = self.head(x.to(self.head.weight.dtype))
        return 5 * torch.tanh(logits / 5) if "softcap" in has else logits, seconds, hidden


def model_of(case: Case) -> Model:
    """With weights drawn from the case's seed, in training mode."""
    torch.manual_seed(case.seed)
    model = Model(case).train()
    return model.to(torch.bfloat16) if case.bf16 else model


def batches_of(case: Case, step: int) -> list[dict[str, Tensor]]:
    """The micro-batches of a step."""
    rows, length = case.shape
    if "short" in case.features and step == 1:
        length = max(4, length // 2 // 4 * 4)
    return [_batch(case, 50 * step + k, rows, length) for k in range(case.slices)]


def _batch(case: Case, seed: int, rows: int, length: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, case.vocabulary, (rows, length), generator=chance)
    labels = ids.clone()
    if seed % 3 == 0:
        labels[torch.rand(labels.shape, generator=chance) < 0.4] = -100
    labels[:, -1] = ids[:, -1]  # there is always something to predict
    batch = {"input_ids": ids, "labels": labels}
    if "masked" in case.features:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, length - 1 - seed % 4 :] = 0
    if "weighted" in case.features:
        batch["weights"] = torch.rand(ids.shape, generator=chance) + 0.5
    return batch
