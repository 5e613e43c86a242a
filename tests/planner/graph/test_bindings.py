"""Which of PyTorch's bindings generated code calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from planner.graph.bindings import binding_of

aten = torch.ops.aten


def bound(target: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """For a call with nodes of a graph in the place of tensors."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()

    def node(value: Any) -> Any:
        if isinstance(value, list):
            return [node(each) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        made = graph.placeholder("x")
        made.meta["val"] = mode.from_tensor(value)
        return made

    return binding_of(target, [node(a) for a in args], {k: node(v) for k, v in kwargs.items()}, torch.empty(0))


X = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("target", "args", "binding"),
    [
        (aten.mm.default, (X, X), torch.mm),
        (aten.mul.Tensor, (X, X), torch.mul),
        (aten.t.default, (X,), torch.t),
        (aten.cat.default, ([X, X], 1), torch.cat),
        (aten.silu.default, (X,), torch._C._nn.silu),
    ],
    ids=["mm", "mul", "t", "cat", "silu"],
)
def test_an_operation_is_called_by_its_binding(target: Any, args: tuple[Any, ...], binding: object) -> None:
    assert bound(target, *args) == binding


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (aten.mul.Scalar, (X, 2.0), {}),  # torch.mul calls mul.Tensor
        (aten._to_copy.default, (X,), {"dtype": torch.float64}),  # there is none
        (aten.slice.Tensor, (X, 0, 1, 2), {}),
        (aten.add_.Tensor, (X, X), {}),
    ],
    ids=["mul.Scalar", "_to_copy", "slice", "add_"],
)
def test_what_a_binding_would_not_call_is_called_as_the_overload_does(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    assert bound(target, *args, **kwargs) == target._op


def test_what_is_no_operation_of_pytorchs_is_called_as_it_is() -> None:
    assert binding_of(max, [1, 2], {}, None) is max
