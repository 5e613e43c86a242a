"""Which views generated code does without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from planner.graph.codegen import Generated, generate, rng_of
from planner.graph.nodes import is_op


def generated(function: Callable[..., object], *tensors: Tensor, sinks: int = 0) -> Generated:
    """Code of a function, the first `sinks` of whose results are handed out on the way."""
    module = make_fx(function, tracing_mode="fake")(*tensors)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    results = list(module.graph.output_node().args[0])
    return generate(
        "code",
        inputs,
        [node for node in module.graph.nodes if is_op(node)],
        results[sinks:],
        constants=module,
        rng=rng_of(torch.device("cpu")),
        swap={},
        sinks={node: [f"weight{number}"] for number, node in enumerate(results[:sinks])},
    )


def calls(function: Callable[..., object], *tensors: Tensor, sinks: int = 0) -> int:
    """How many operations its code calls, with the numbers and the layouts of the function itself."""
    code = generated(function, *tensors, sinks=sinks)
    handed: list[Tensor] = []
    made, _ = code.function([t.clone() for t in tensors], [], lambda weight, value: handed.append(value))
    for found, wanted in zip([*handed, *made], function(*tensors), strict=True):
        assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    return sum("(" in line for line in code.source.splitlines()[1:] if "_sink" not in line and "clear" not in line)


def read_twice(x: Tensor, w: Tensor) -> list[Tensor]:
    turned = w.t()
    return [x @ turned, turned.t() + 1]


def test_a_transpose_of_a_transpose_is_the_tensor_itself() -> None:
    x, w = torch.rand(2, 3), torch.rand(4, 3)
    assert calls(lambda x, w: [x @ w.t().t().t()], x, w) == 2
    assert calls(read_twice, x, w) == 4
    assert calls(lambda x: [x.t().t().t().t() + 1], x) == 1


def test_a_view_of_views_is_one_view_and_of_the_same_shape_none() -> None:
    x = torch.rand(6, 4)
    assert calls(lambda x: [x.view(2, 3, 4).view(2, 12) + 1], x) == 2
    assert calls(lambda x: [x.view(24).view(6, 4) + 1], x) == 1
    assert calls(lambda x: [x.view(6, 4) + 1], x) == 1
    assert calls(lambda x: [x.view(24).view(6, 4) + 1, x.view(24) * 2], x) == 3


def test_views_of_what_has_gaps_are_made_one_after_another() -> None:
    assert calls(lambda x: [x[:, ::2].view(2, 3, 2).view(2, 3, 2, 1) + 1], torch.rand(6, 4)) == 4


def test_a_result_is_made_as_it_was_traced_and_what_is_handed_out_is_not() -> None:
    x, y = torch.rand(2, 3), torch.rand(3, 2)
    assert calls(lambda x, y: [(x @ y).t().t()], x, y) == 3
    assert calls(lambda x, y: [(x @ y).t().t(), x + 1], x, y, sinks=1) == 2
    assert calls(lambda x, y: [(x @ y).t(), x + 1], x, y, sinks=1) == 3


def test_a_name_dies_where_its_node_does() -> None:
    code = generated(lambda x, y: [(x @ y).t().t() + 1], torch.rand(2, 3), torch.rand(3, 2))
    lines = [line.strip() for line in code.source.splitlines()]
    assert lines[lines.index("t = mm") + 1] == "del mm"
    assert [step.dead for step in code.steps if is_view_of(step.node, "mm")] == [(code.steps[0].node,)]


def is_view_of(node: fx.Node, name: str) -> bool:
    return node.name == "t" and node.args[0].name == name  # type: ignore[union-attr]
