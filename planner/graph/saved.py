"""What of a block's forward its backward finds, and what it computes again."""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from typing import Any, cast

import torch
from torch import fx

from planner.graph.joint import Joint
from planner.graph.nodes import is_op, is_view


def forward_nodes(joint: Joint) -> list[fx.Node]:
    """What the block's forward computes, in the graph's order."""
    found: set[fx.Node] = set()
    todo = list(joint.outputs)
    while todo:
        node = todo.pop()
        if node.op != "placeholder" and node not in found:
            found.add(node)
            todo += node.all_input_nodes
    # A dropout's mask, the logsumexp of attention, mean and rstd of a norm are no ancestors of an output. Without them
    # here they could not be saved, and "keep" would run those operations (and their random state) twice.
    nodes = joint.module.graph.nodes
    found |= {n for n in nodes if n.target is operator.getitem and n.args[0] in found}
    return [n for n in nodes if n in found]


def savable(forward: Sequence[fx.Node]) -> set[fx.Node]:
    """Those of forward's nodes whose values it can hand to backward. Unpacked, quantized weights are none: they would
    take the room that packing frees."""
    todo = [n for n in forward if is_op(n) and cast(Any, n.target).namespace in ("bitsandbytes", "offmate")]
    unpacking = set[fx.Node]()
    while todo:
        node = todo.pop()
        if node.op != "placeholder" and node not in unpacking:
            unpacking.add(node)
            todo += node.all_input_nodes
    return {n for n in forward if n not in unpacking and not is_view(n) and torch.is_tensor(n.meta.get("val"))}


def cut(grads: Sequence[fx.Node], may_save: Container[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Walk back from the gradients and stop at what exists (inputs, tangents) or may be saved. Returns what is saved
    and what backward computes."""
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
