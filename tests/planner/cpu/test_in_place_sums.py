"""Sums of gradients are where autograd has them when nobody looks on."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.cpu.meter import Meter

SIZE = 1000


class Part(torch.autograd.Function):
    """Passes on; its gradient is a new tensor, which `kept` holds where it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrived: list[int], kept: list[Tensor] | None) -> Tensor:
        ctx.given = arrived, kept
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        arrived, kept = ctx.given
        made = grad * 2.0
        arrived.append(made.data_ptr())
        if kept is not None:
            kept.append(made)
        return made, None, None


def backward(*, watched: bool, kept: list[Tensor] | None = None, peak: list[int] | None = None) -> tuple[bool, Tensor]:
    """Whether the sum of three gradients lies where the first of them did, and the sum. `peak`: gets the most bytes
    that there were at one time, in tensors."""
    torch.manual_seed(0)
    x = torch.rand(SIZE, requires_grad=True)
    arrived: list[int] = []
    y = x * 1.0
    total = sum(Part.apply(y, arrived, kept) for _ in range(3))
    found: list[Tensor] = []
    y.register_hook(found.append)
    meter, ones = Meter(), torch.ones(SIZE)
    with meter.watch() if watched else contextlib.nullcontext():
        total.backward(ones)
    if peak is not None:
        peak.append(meter.peak // (4 * SIZE))
    return found[0].data_ptr() == arrived[0], found[0]


@pytest.mark.parametrize("watched", [False, True])
def test_a_sum_of_gradients_is_in_the_memory_of_the_first(watched: bool) -> None:
    in_place, grad = backward(watched=watched)
    assert in_place
    assert torch.equal(grad, torch.full((SIZE,), 6.0))


@pytest.mark.parametrize("watched", [False, True])
def test_a_gradient_that_somebody_holds_is_not_changed(watched: bool) -> None:
    kept: list[Tensor] = []
    in_place, grad = backward(watched=watched, kept=kept)
    assert not in_place
    assert torch.equal(grad, torch.full((SIZE,), 6.0))
    assert all(torch.equal(part, torch.full((SIZE,), 2.0)) for part in kept)


def test_a_meter_counts_no_tensor_for_it() -> None:
    peak: list[int] = []
    backward(watched=True, peak=peak)
    assert peak == [2], "the sum, and the gradient that is added to it"
