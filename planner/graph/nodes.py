"""Classifies operations of a traced graph (random, view, in place), and finds which storages hold their values."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
StorageId = tuple[fx.Node, int]


def is_op(node: fx.Node) -> bool:
    """Whether the node calls an operation of PyTorch's dispatcher (`getitem` is none)."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers. PyTorch tags attention as random, but without dropout it draws none."""
    if not is_op(node) or torch.Tag.nondeterministic_seeded not in _overload(node).tags:
        return False
    for i, argument in enumerate(_overload(node)._schema.arguments):
        if argument.name == "dropout_p":
            default = node.kwargs.get("dropout_p", argument.default_value)
            return bool(node.args[i] if i < len(node.args) else default)
    return True


def is_view(node: fx.Node) -> bool:
    """Whether the node's value is a view of its first argument."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(parent(node))  # getitem of split is a view, of layer_norm it is not
    if not (node.args and isinstance(node.args[0], fx.Node)):
        return False  # the conjugate of a complex number
    return is_op(node) and (_overload(node).is_view or node.target is _aten._unsafe_view.default)


def is_mutable(node: fx.Node) -> bool:
    """Whether the node works in place: it writes into an argument and returns it."""
    return is_op(node) and _overload(node)._schema.is_mutable


def parent(node: fx.Node) -> fx.Node:
    """The first argument of `node`, which is a node."""
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def nbytes(value: Any) -> int:
    """Bytes of the storage under a (fake) tensor; 0 for anything else."""
    return value.untyped_storage().nbytes() if torch.is_tensor(value) else 0


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill its memory without gaps, in any order of dimensions."""
    after = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != after:
            return False
        after *= size
    return True


def _overload(node: fx.Node) -> Any:
    return node.target


class Storages:
    """Which storages hold the value of each node, so that each byte is counted once. `of`: node -> its storages; a
    view has those of its base. `bytes`: storage -> its size."""

    def __init__(self, graph: fx.Graph) -> None:
        self.of: dict[fx.Node, list[StorageId]] = {}
        self.bytes: dict[StorageId, int] = {}
        for node in graph.nodes:
            self._add(node)

    def _add(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            whole, index = self.of[parent(node)], node.args[1]
            assert isinstance(index, int)
            self.of[node] = [whole[index]] if len(whole) > 1 else whole
        elif is_view(node) or is_mutable(node):
            self.of[node] = self.of[parent(node)]
        elif isinstance(value, (tuple, list)):
            self.of[node] = [(node, i) for i in range(len(value))]
            self.bytes.update({(node, i): nbytes(v) for i, v in enumerate(value)})
        elif node.op in ("call_function", "placeholder"):
            self.of[node] = [(node, 0)]
            self.bytes[node, 0] = nbytes(value)
        else:
            self.of[node] = []

    def own(self, node: fx.Node) -> bool:
        """Whether the node's value is contiguous and is all that its storage holds, a storage that the graph itself
        allocates. The value may still be a view: the gradient of a linear layer's weight is the transpose of a
        transpose."""
        if node.op != "call_function" or [source.op for source, _ in self.of[node]] != ["call_function"]:
            return False
        value = node.meta["val"]
        return bool(value.is_contiguous() and nbytes(value) == value.numel() * value.element_size())

    def saved_bytes(self, nodes: list[fx.Node]) -> int:
        """The bytes of the storages that hold the values of `nodes`; a storage that several share counts once."""
        return sum(self.bytes[s] for s in {s: None for node in nodes for s in self.of[node]})
