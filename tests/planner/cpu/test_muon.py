"""Muon's update of a matrix: that of torch.optim.Muon in every bit, in memory of known size."""

from __future__ import annotations

import pytest
import torch

from planner.cpu.meter import Meter
from planner.optimizers.muon import MATCH_RMS, MOMENTUM, ORIGINAL, Matrix, Muon, flops, update

torch.set_num_threads(1)
SHAPES = [(8, 64), (64, 8), (5, 3), (1, 7), (33, 77), (77, 33), (64, 64), (96, 200)]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("adjust", [MATCH_RMS, ORIGINAL])
def test_steps_are_those_of_pytorchs_muon(shape, narrow, adjust):
    draw = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape, generator=draw))
    optimizer = torch.optim.Muon([weight], lr=1e-2, weight_decay=0.1, momentum=MOMENTUM, adjust_lr_fn=adjust)
    master, momentum, coefficient = weight.detach().clone(), torch.zeros(shape), torch.tensor(0.3)
    work = master.bfloat16() if narrow else master
    matrix = Matrix("w", 0.1, work, master, momentum, torch.empty(shape, dtype=work.dtype))
    for _ in range(3):
        matrix.gradient.normal_(generator=draw)
        weight.grad = matrix.gradient.float() * coefficient
        optimizer.step()
        update(matrix, learning_rate=1e-2, momentum=MOMENTUM, adjust=adjust, coefficient=coefficient)
        assert torch.equal(master, weight)
        assert torch.equal(momentum, optimizer.state[weight]["momentum_buffer"])
        assert torch.equal(work, master.to(work.dtype))


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("shape", [(96, 200), (200, 96)], ids=str)
def test_an_update_takes_the_memory_it_says(shape, narrow):
    master, momentum, gradient = (torch.ones(shape) for _ in range(3))
    work = master.bfloat16() if narrow else master
    matrix = Matrix("w", 0.0, work, master, momentum, gradient.to(work.dtype))
    meter = Meter()
    for tensor in (work, master, momentum, matrix.gradient):
        meter.add(tensor)
    before = meter.now
    with meter.watch():
        update(matrix, learning_rate=1e-2, momentum=MOMENTUM)
    elements = 96 * 200
    expected = Muon(shorter_side=96).scratch_bytes(elements, narrow=narrow)
    assert meter.peak - before == expected
    assert 0 <= expected - (elements * (6 if narrow else 2) + 4 * 96**2 + 2) < 5 * 512


def test_the_arithmetic_is_counted():
    assert flops(2, 6) == 5 * 2 * (2 * 2 * 3 + 2 * 2 * 2 + 2 * 2 * 3)
