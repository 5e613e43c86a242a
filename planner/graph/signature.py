"""How a call's arguments nest, which of them are tensors, and when two calls may share generated code."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, register_pytree_node, tree_flatten, tree_unflatten
from transformers import cache_utils

from planner.graph.result import Mappings, recorded_names

# Of layers, which later layers take. Not all versions of transformers have it.
_KeysAndValues: Any = getattr(cache_utils, "KVSharingDict", None)
if _KeysAndValues is not None and _KeysAndValues not in SUPPORTED_NODES:
    register_pytree_node(
        _KeysAndValues,
        lambda mapping: (list(mapping.values()), list(mapping)),
        lambda values, keys: _KeysAndValues(zip(keys, values, strict=True)),
        serialized_type_name="transformers.cache_utils.KVSharingDict",
    )


@dataclass(frozen=True, slots=True)
class CallShape:
    """A call without its tensors. `rest` has None where a tensor was, `where` says where; `recorded` is what the hooks
    inside record then; `key` equal: same code."""

    rest: tuple[Any, ...]
    where: tuple[int, ...]
    spec: TreeSpec
    recorded: tuple[str, ...]
    key: tuple[Hashable, ...]

    @property
    def text(self) -> str:
        """The same where `key` is, from one run to the next too: what is measured is kept under names made of it."""
        return repr((self.spec, *self.key[1:]))

    def nest(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the call with `tensors` in their places."""
        flat = list(self.rest)
        for position, tensor in zip(self.where, tensors, strict=True):
            flat[position] = tensor
        args, kwargs = tree_unflatten(flat, self.spec)
        return args, kwargs


def mappings_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mappings:
    """The arguments that are tables, into which the block may put what later blocks take."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, MutableMapping)]


def left_in(mappings: Mappings, before: Sequence[Mapping[Any, Any]]) -> list[dict[Any, Any]]:
    """What is new in each of the tables, `before` being what was in it. Raises TypeError where something is gone."""
    if any(old.keys() - mapping.keys() for old, mapping in zip(before, mappings, strict=True)):
        raise TypeError("it takes something out of a table that it is given")
    return [
        {key: value for key, value in mapping.items() if old.get(key) is not value}
        for old, mapping in zip(before, mappings, strict=True)
    ]


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[CallShape, list[torch.Tensor]]:
    """The shape of a call and its tensors in order."""
    flat, structure, spec = _flatten((tuple(args), dict(kwargs)))
    where = tuple(i for i, x in enumerate(flat) if torch.is_tensor(x))
    tensors = [flat[i] for i in where]
    rest = tuple(None if torch.is_tensor(x) else x for x in flat)
    recorded = recorded_names()
    key = (
        structure,
        recorded,
        tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors),
        # What is no plain value (a configuration, a cache) counts by its type: it may have no equality of its own.
        tuple(x if isinstance(x, (bool, int, float, str, type(None), torch.dtype)) else type(x) for x in rest),
    )
    return CallShape(rest, where, spec, recorded, key), tensors


_specs: dict[Hashable, TreeSpec] = {}


def _flatten(value: Any) -> tuple[list[Any], Hashable, TreeSpec]:
    """What is in a nest, how it nests as a value that is quick to compare, and as PyTorch has it. Every call of every
    block is flattened: PyTorch takes a tenth of a millisecond to do it."""
    flat: list[Any] = []
    structure = _walk(value, flat)
    if structure is _UNUSUAL:
        flat, spec = tree_flatten(value)
        return flat, spec, spec
    if structure not in _specs:
        _specs[structure] = tree_flatten(value)[1]
    return flat, structure, _specs[structure]


_UNUSUAL = "unusual"


def _walk(value: Any, flat: list[Any]) -> Hashable:
    """How `value` nests, its leaves appended to `flat` in PyTorch's order; None for a leaf. `_UNUSUAL` where there is
    more than plain tuples, lists and dictionaries."""
    kind = type(value)
    if kind is tuple or kind is list:
        parts = [_walk(part, flat) for part in value]
        return _UNUSUAL if _UNUSUAL in parts else (kind, *parts)
    if kind is dict:
        parts = [_walk(part, flat) for part in value.values()]
        return _UNUSUAL if _UNUSUAL in parts else (kind, *value, *parts)
    if kind in SUPPORTED_NODES or issubclass(kind, tuple):
        return _UNUSUAL
    flat.append(value)
    return None
