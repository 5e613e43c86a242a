"""A joint graph for gradients that arrive laid out otherwise than it was traced for.

The trace assumes gradients laid out as the block's results. What the frame does with a result may turn its gradient
round or expand it; code that eager runs on it copies where a view is not possible, and so does the graph made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from planner.graph.joint import Joint
from planner.graph.nodes import nbytes, parent

_aten = torch.ops.aten
_CLONE = _aten.clone.default
_SEES = (_aten.view.default, _aten._unsafe_view.default)

Layout = tuple[tuple[int, ...], ...]
"""The strides of each gradient; of dimensions of one element, which say nothing, zero."""


def layout_of(tensors: Sequence[Tensor]) -> Layout:
    """How `tensors` are laid out."""
    return tuple(
        tuple(stride if size > 1 else 0 for size, stride in zip(t.shape, t.stride(), strict=True)) for t in tensors
    )


def laid_out(joint: Joint, layout: Layout) -> Joint:
    """`joint` with gradients coming in under `layout`: what is computed from them has the strides that eager's has, and
    where its memory cannot be seen under another shape there is a copy of it, as `reshape` makes one in eager."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    strides = dict(zip(joint.tangents, layout, strict=True))
    other = set[fx.Node]()  # whose values are not laid out as traced
    with _disable_current_modes(), torch.no_grad(), _mode_of(joint):
        for node in joint.module.graph.nodes:
            if node.op == "output":
                break
            changed = not other.isdisjoint(node.all_input_nodes)
            made = new[node] = graph.node_copy(node, new.__getitem__)
            if changed and node.target in _SEES:
                source, shape = parent(made), made.args[1]
                made.target = _aten.reshape.default  # a view, as far as the fake tensors know
                if not _can_see(source, shape):
                    with graph.inserting_before(made):
                        copy = graph.call_function(_CLONE, (source,), {"memory_format": torch.contiguous_format})
                    copy.meta["val"] = _value(copy)
                    made.args = copy, shape
            if node in strides:
                traced = node.meta["val"]
                made.meta["val"] = traced.new_empty_strided(traced.shape, strides[node])
            elif changed:
                made.meta["val"] = _value(made)
            if _facts(made) != _facts(node):
                other.add(node)
        graph.output(None)
    return replace(
        joint,
        module=fx.GraphModule(joint.module, graph),
        params={name: new[node] for name, node in joint.params.items()},
        buffers={name: new[node] for name, node in joint.buffers.items()},
        inputs=[new[node] if node is not None else None for node in joint.inputs],
        tangents=[new[node] for node in joint.tangents],
        outputs=[new[node] for node in joint.outputs],
        grads={key: new[node] if node is not None else None for key, node in joint.grads.items()},
    )


def _mode_of(joint: Joint) -> FakeTensorMode:
    return next(value.fake_mode for node in joint.tangents if isinstance(value := node.meta["val"], FakeTensor))


def _can_see(node: fx.Node, shape: Any) -> bool:
    """Whether the memory of `node` can be seen under `shape`."""
    try:
        node.meta["val"].view(shape)
    except (RuntimeError, ValueError):  # of a real tensor and of a fake one
        return False
    return True


def _value(node: fx.Node) -> Any:
    """What `node` makes of its arguments' values."""
    arguments: Any = node.args, node.kwargs
    args, kwargs = fx.map_arg(arguments, lambda n: n.meta["val"])
    if node.target is _aten.native_dropout_backward.default and args[0].device.type == "cpu":
        return args[0] * args[1]  # the CPU's result is laid out so, the fake one as CUDA's
    return cast(Any, node.target)(*args, **kwargs)


def _facts(node: fx.Node) -> list[object]:
    """How what `node` makes is laid out."""
    made = [t for t in tree_leaves(node.meta.get("val")) if torch.is_tensor(t)]
    return [layout_of(made), *map(nbytes, made)]
