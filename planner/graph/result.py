"""Takes a block's result apart into tensors and nests it again, with what hooks in the block record for the frame."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers.utils.output_capturing import _active_collector

_running: Any = _active_collector  # of the model's forward that runs in this thread: what its hooks record into

Mappings = Sequence[MutableMapping[Any, Any]]

Records = Mapping[str, Sequence[Any]]
"""What was recorded, under the names that transformers' models have for it (router_logits, attentions)."""


@dataclass(frozen=True, slots=True)
class _Made:
    """Stands for tensor `index` of those that the block makes."""

    index: int


@dataclass(frozen=True, slots=True)
class _Given:
    """Stands for the block's tensor argument `index`, returned as it is."""

    index: int


@dataclass(frozen=True, slots=True)
class Result:
    """How a block's result, its records, and what it leaves in tables that it is given nest. `leaves`: tensors that the
    block makes, arguments that it returns as they are, and other values. `differentiable`: for each tensor that the
    block makes, whether it has a gradient."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    differentiable: tuple[bool, ...]

    @classmethod
    def of(
        cls, value: Any, records: Records, tables: Sequence[Mapping[Any, Any]], arguments: Sequence[Tensor]
    ) -> tuple[Result, tuple[Tensor, ...]]:
        """The `Result` of a call with these tensor arguments, and the tensors that the call made. The call returned
        `value`; `tables`: what it has put into each table that it was given."""
        flat, spec = tree_flatten((value, {key: list(values) for key, values in records.items()}, list(tables)))
        where = {id(tensor): index for index, tensor in enumerate(arguments)}
        tensors = tuple({id(leaf): leaf for leaf in flat if torch.is_tensor(leaf) and id(leaf) not in where}.values())
        places = {id(tensor): index for index, tensor in enumerate(tensors)}  # one may be in several places
        marks = {key: _Made(index) for key, index in places.items()} | {
            key: _Given(index) for key, index in where.items()
        }
        leaves = [marks[id(leaf)] if torch.is_tensor(leaf) else leaf for leaf in flat]
        return cls(spec, tuple(leaves), tuple(tensor.requires_grad for tensor in tensors)), tensors

    def deliver(self, tensors: Sequence[Tensor], arguments: Sequence[Tensor], mappings: Mappings) -> Any:
        """The block's result with `tensors` and `arguments` in their places. Records are recorded once more, for the
        frame that is running; what the block leaves in tables is put into `mappings`."""
        leaves = [
            tensors[leaf.index]
            if isinstance(leaf, _Made)
            else arguments[leaf.index]
            if isinstance(leaf, _Given)
            else leaf
            for leaf in self.leaves
        ]
        value, records, tables = tree_unflatten(leaves, self.spec)
        for mapping, new in zip(mappings, tables, strict=True):
            mapping.update(new)
        running = _running.get() or {}
        for key, values in records.items():
            running[key].extend(values)
        return value


def recorded_names() -> tuple[str, ...]:
    """The names of what hooks inside a block would record now, but hidden states: blocks' own hooks record these."""
    running = _running.get() or {}
    return tuple(key for key in running if not key.lstrip("_").startswith("hidden_states"))


@contextlib.contextmanager
def recording(names: Sequence[str]) -> Iterator[Records]:
    """Inside, hooks record what has these names, into the table that this context returns."""
    records: dict[str, list[Any]] = {name: [] for name in names}
    token = _running.set(records or None)
    try:
        yield records
    finally:
        _running.reset(token)
