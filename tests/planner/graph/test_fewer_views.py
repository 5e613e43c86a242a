"""Which views generated code does without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from planner.graph.fewer_views import Line, lines_of
from planner.graph.nodes import is_op


def traced(function: Callable[..., object], *tensors: Tensor) -> tuple[list[fx.Node], list[fx.Node]]:
    """The operations of a function, and its results."""
    graph = make_fx(function, tracing_mode="fake")(*tensors).graph
    results = graph.output_node().all_input_nodes
    return [node for node in graph.nodes if is_op(node)], results


def called(function: Callable[..., object], *tensors: Tensor) -> list[str]:
    """What is called, and of what."""
    nodes, results = traced(function, *tensors)
    lines = lines_of(nodes, results=results, sinks=())
    return [f"{line.target}({', '.join(map(str, line.args))})" for line in lines if line is not None]


def test_a_transpose_of_a_transpose_is_the_tensor_itself() -> None:
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    thrice = called(lambda x, w: x @ w.t().t().t(), x, w)
    assert thrice == ["aten.t.default(w_1)", "aten.mm.default(x_1, t_2)"]
    turned = called(lambda x: x.transpose(0, 2).transpose(-1, 0) + 1, torch.ones(2, 3, 4))
    assert turned == ["aten.add.Tensor(x_1, 1)"]
    other = called(lambda x: x.transpose(0, 2).transpose(1, 2) + 1, torch.ones(2, 3, 4))
    assert len(other) == 3


def test_a_view_of_views_is_one_view_and_of_the_same_shape_none() -> None:
    x = torch.ones(6, 4)
    assert called(lambda x: x.view(2, 3, 4).view(2, 12) + 1, x) == [
        "aten.view.default(x_1, [2, 12])", "aten.add.Tensor(view_1, 1)"
    ]  # fmt: skip
    assert called(lambda x: x.view(24).view(6, 4) + 1, x) == ["aten.add.Tensor(x_1, 1)"]


def test_a_view_that_others_read_too_is_made_once() -> None:
    found = called(lambda x: (x.view(24).view(6, 4) + 1, x.view(24) * 2), torch.ones(6, 4))
    assert [text.partition("(")[0] for text in found].count("aten.view.default") == 1


def test_a_result_is_made_as_it_was_traced() -> None:
    found = called(lambda x: x.view(24).view(6, 4), torch.ones(6, 4))
    assert found == ["aten.view.default(x_1, [24])", "aten.view.default(view, [6, 4])"]


def test_what_is_handed_out_on_the_way_is_the_tensor_itself() -> None:
    nodes, results = traced(lambda x, y: ((x @ y).t().t(), x + 1)[1], torch.ones(2, 2), torch.ones(2, 2))
    product, _, twice, _ = nodes
    lines = lines_of(nodes, results=results, sinks=[twice])
    assert lines[1] is None
    assert lines[2] == Line(twice, None, (product,), {})


def test_a_view_of_an_input_stays_where_the_input_is_a_view_that_another_function_made() -> None:
    nodes, results = traced(lambda x: x.view(24).view(2, 12) + 1, torch.ones(6, 4))
    (line, _) = lines_of(nodes[1:], results=results, sinks=())
    assert line is not None
    assert line.args[0] is nodes[0]
