"""The work of operations: floating point operations as PyTorch counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry, shape_wrapper

from planner.graph.work import Counting

aten = torch.ops.aten
ROWS, HEADS, GROUPS, LENGTH, WIDTH = 2, 8, 2, 16, 64
PRODUCT = 2 * ROWS * HEADS * LENGTH * LENGTH * WIDTH


def of_equal_heads(formula: Any, keys: int) -> Any:
    """As PyTorch's before 2.13; `keys`: where the keys' shape is among the arguments, after the queries'."""

    def checked(*shapes: Any, **kwargs: Any) -> int:
        if shapes[keys - 1][1] != shapes[keys][1]:
            raise AssertionError("query/key/value shapes are incompatible")
        return int(formula(*shapes, **kwargs))

    return shape_wrapper(checked)


@pytest.mark.parametrize("groups", [HEADS, GROUPS])
def test_fused_attention_with_grouped_heads_computes_with_all_of_them(
    monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    forward, backward = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward
    for operation, keys in ((forward, 1), (backward, 2)):
        formula = flop_registry[operation].__wrapped__
        monkeypatch.setitem(flop_registry, operation, of_equal_heads(formula, keys))
    q, k, v = (
        torch.empty(ROWS, n, LENGTH, WIDTH, dtype=torch.bfloat16, device="meta") for n in (HEADS, groups, groups)
    )
    with Counting() as counting:
        out, logsumexp, *rest = forward(q, k, v, 0.0, True)
        backward(torch.empty_like(q), q, k, v, out, logsumexp, *rest[:4], 0.0, True, *rest[4:6])
    assert [work.flops for work in counting.work[-1:]] == [5 * PRODUCT]
    assert 2 * PRODUCT in [work.flops for work in counting.work]
