"""Flattens a block's result into tensors and nests it again, with the values that hooks inside the block record for
the model (router logits, attentions)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers.utils.output_capturing import _active_collector

_running: Any = _active_collector  # what hooks record into, for the model's forward that runs in this thread

Mappings = Sequence[MutableMapping[Any, Any]]

Records = Mapping[str, Sequence[Any]]
"""What hooks recorded, under the names that transformers' models use (router_logits, attentions)."""


@dataclass(frozen=True, slots=True)
class _Made:
    """Marks the place of output tensor `index` of the block in its nested result."""

    index: int


@dataclass(frozen=True, slots=True)
class _Given:
    """Marks a place in the block's nested result where its tensor argument `index` is returned unchanged."""

    index: int


Mark = _Made | _Given


@dataclass(frozen=True, slots=True)
class Result:
    """How a block's result nests, together with its recorded values and its new entries in dictionaries among its
    arguments. `leaves`: marks for tensors that the block computes and for arguments that it returns unchanged; other
    values as they are. `differentiable`: for each tensor that the block computes, whether it has a gradient."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    differentiable: tuple[bool, ...]

    @classmethod
    def of(
        cls, value: Any, records: Records, tables: Sequence[Mapping[Any, Any]], arguments: Sequence[Tensor]
    ) -> tuple[Result, tuple[Tensor, ...]]:
        """Flattens the outcome of a block's call. Returns its nesting as a `Result`, and the tensors that the call
        computed. `value`: what the call returned; `records`: what hooks recorded; `tables`: the new entries in each
        dictionary among its arguments; `arguments`: its tensor arguments."""
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
        """The block's result, with `tensors` (what the block computed) and its tensor `arguments` put in their places.
        Recorded values are recorded again for the forward of the model that is running; new entries are written into
        `mappings`, the dictionaries among the block's arguments."""
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
    """The names of the values that hooks inside a block would record now, without hidden states: these are recorded by
    hooks on the block itself."""
    running = _running.get() or {}
    return tuple(key for key in running if not key.lstrip("_").startswith("hidden_states"))


def recorded_values() -> dict[str, list[Any]]:
    """A copy of what hooks have recorded so far in the model's forward that is running."""
    return {name: list(values) for name, values in (_running.get() or {}).items() if isinstance(values, list)}


@contextlib.contextmanager
def recording(names: Sequence[str]) -> Iterator[Records]:
    """A context in which hooks record values under these names. Yields the dictionary that they are recorded into."""
    records: dict[str, list[Any]] = {name: [] for name in names}
    token = _running.set(records or None)
    try:
        yield records
    finally:
        _running.reset(token)
