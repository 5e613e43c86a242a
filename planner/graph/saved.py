"""Decides which values of a block's forward are saved for its backward, and which backward computes again."""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from typing import Any, cast

import torch
from torch import fx

from planner.graph.joint import Joint
from planner.graph.nodes import is_op, is_view


def forward_nodes(joint: Joint) -> list[fx.Node]:
    """The nodes of the joint (forward and backward) graph that the block's forward computes, in the graph's order."""
    computed: set[fx.Node] = set()
    todo = list(joint.outputs)
    while todo:
        node = todo.pop()
        if node.op != "placeholder" and node not in computed:
            computed.add(node)
            todo += node.all_input_nodes
    # A dropout's mask, the logsumexp of attention, mean and rstd of a norm are no ancestors of an output. They are
    # added here: else they could not be saved, and "keep" would run their operations (and random state) twice.
    nodes = joint.module.graph.nodes
    computed |= {n for n in nodes if n.target is operator.getitem and n.args[0] in computed}
    return [n for n in nodes if n in computed]


def savable(forward: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes of `forward` whose values can be saved for backward. Views cannot, nor weights that forward unpacks
    from 4 or 8 bits: they would take the memory that packing frees."""
    todo = [n for n in forward if is_op(n) and cast(Any, n.target).namespace in ("bitsandbytes", "offmate")]
    unpacking = set[fx.Node]()
    while todo:
        node = todo.pop()
        if node.op != "placeholder" and node not in unpacking:
            unpacking.add(node)
            todo += node.all_input_nodes
    return {n for n in forward if n not in unpacking and not is_view(n) and torch.is_tensor(n.meta.get("val"))}


def cut(grads: Sequence[fx.Node], may_save: Container[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Split what backward reads into saved and computed values. Walks back from the gradients `grads`, and stops at
    values that exist (inputs, incoming gradients) or may be saved. Returns the nodes that are saved, and the nodes
    that backward computes."""
    saved, needed = set[fx.Node](), set[fx.Node]()
    todo = list(grads)
    while todo:
        node = todo.pop()
        if node in needed or node in saved or node.op == "placeholder":
            continue
        if node in may_save:
            saved.add(node)
        else:
            needed.add(node)
            todo += node.all_input_nodes
    return saved, needed
