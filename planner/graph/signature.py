"""Describes how a call's arguments nest and which of them are tensors, so that calls of equal form can share generated
code."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, register_pytree_node, tree_flatten, tree_unflatten
from transformers import cache_utils

from planner.graph.result import Mappings, recorded_names

# Keys and values of layers, which later layers read. Not all versions of transformers have this class.
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
    """A call of a block without its tensors. `rest`: the flat arguments, None in place of tensors. `where`: the
    positions of the tensors. `spec`: how the arguments nest. `recorded`: the names of the values that hooks inside the
    block record in this call (such as hidden states). Calls with equal `key` share generated code."""

    rest: tuple[Any, ...]
    where: tuple[int, ...]
    spec: TreeSpec
    recorded: tuple[str, ...]
    key: tuple[Hashable, ...]

    @property
    def text(self) -> str:
        """`key` as text. It is the same in each run of the program: stored measurements are named after it."""
        return repr((self.spec, *self.key[1:]))

    def nest(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The (args, kwargs) of the call, with `tensors` put in their places."""
        flat = list(self.rest)
        for position, tensor in zip(self.where, tensors, strict=True):
            flat[position] = tensor
        args, kwargs = tree_unflatten(flat, self.spec)
        return args, kwargs


def mappings_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mappings:
    """The dictionaries among a block's arguments. The block may put values into them that later blocks read."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, MutableMapping)]


def left_in(mappings: Mappings, before: Sequence[Mapping[Any, Any]]) -> list[dict[Any, Any]]:
    """For each dictionary in `mappings`, the entries that are new or changed since `before`, a copy of each. Raises
    TypeError if an entry was removed."""
    if any(old.keys() - mapping.keys() for old, mapping in zip(before, mappings, strict=True)):
        raise TypeError("it takes something out of a table that it is given")
    return [
        {key: value for key, value in mapping.items() if old.get(key) is not value}
        for old, mapping in zip(before, mappings, strict=True)
    ]


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[CallShape, list[torch.Tensor]]:
    """The shape of a call (everything but its tensors), and its tensors in order."""
    flat, structure, spec = _flatten((tuple(args), dict(kwargs)))
    where = tuple(i for i, x in enumerate(flat) if torch.is_tensor(x))
    tensors = [flat[i] for i in where]
    constants = tuple(None if torch.is_tensor(x) else x for x in flat)
    recorded = recorded_names()
    key = (
        structure,
        recorded,
        tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors),
        # Other values than plain ones (a configuration, a cache) count by type: they may define no equality.
        tuple(x if isinstance(x, (bool, int, float, str, type(None), torch.dtype)) else type(x) for x in constants),
    )
    return CallShape(constants, where, spec, recorded, key), tensors


_specs: dict[Hashable, TreeSpec] = {}


def _flatten(value: Any) -> tuple[list[Any], Hashable, TreeSpec]:
    """The leaves of `value`, its nesting as a value that is quick to compare, and its nesting as PyTorch's spec. It is
    quicker than PyTorch's own flattening, which takes a tenth of a millisecond, because every call of every block is
    flattened."""
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
    """How `value` nests, as nested tuples, None for a leaf; appends the leaves to `flat` in PyTorch's order. Returns
    `_UNUSUAL` if `value` has other containers than plain tuples, lists and dictionaries."""
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
