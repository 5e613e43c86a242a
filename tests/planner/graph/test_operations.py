"""A block with one operation of PyTorch, in the code that runs it and in plain PyTorch: equal bits, the bytes said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.cpu.meter import Meter
from planner.errors import UserError
from planner.graph import RECIPES, EagerPair, make_pairs, trace_block
from planner.graph.tangents import layout_of
from tests.support.operations import ALL, OWN_CODE, Part

torch.set_num_threads(1)

LAYOUTS = {
    "in order": lambda t: t,
    "turned": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda t: t[:1, :1].expand_as(t),
}


class Block(nn.Module):
    """The operation behind a layer, which needs its gradient."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(8, 8), Part(name, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(torch.tanh(self.first(x)))


def codes_of(block, x):
    """The code of each way to run the block, by name."""
    try:
        joint = trace_block(block, (x,), {})
    except UserError as error:
        return {"eager": EagerPair.measured(block, (x,), {}, name="block", reason=error.what)}
    return make_pairs(joint, [RECIPES["keep"], RECIPES["recompute"]])


def run(code, block, x, tangent):
    """Result, the input's gradient, the weights' by name, and by how much forward and backward exceed what is said."""
    meter, sums, buffers = Meter(), {}, [b.clone() for b in block.buffers()]
    primals = [*(p.detach() for p in block.parameters()), *buffers, x.detach()]
    for tensor in (*primals, tangent):
        meter.add(tensor)
    code = code.for_tangents(layout_of([tangent]))
    with meter.watch(), torch.no_grad():
        before = meter.now
        results, states = code.forward(list(primals))
        over = [meter.peak - before - code.forward_peak]
        made, saved = results[0].clone(), results[1:]
        del results
        values = [*saved, *(primals[i] for i in code.backward_primals), tangent]
        del saved
        before = meter.now
        meter.reset_peak()
        (grad,) = code.backward(values, states, lambda name, g: sums.__setitem__(name, g))
        over.append(meter.peak - before - code.backward_peak[True])
    return made, grad, sums, over


@pytest.mark.parametrize("name", ALL)
def test_an_operation_has_the_bits_of_plain_pytorch_and_the_bytes_that_are_said(name):
    torch.manual_seed(0)
    block, x = Block(name), torch.randn(2, 4, 8, requires_grad=True)
    codes, buffers = codes_of(block, x), [b.clone() for b in block.buffers()]
    assert ("eager" in codes) == (name in OWN_CODE)

    def anew():
        for buffer, before in zip(block.buffers(), buffers, strict=True):
            buffer.copy_(before)
        torch.manual_seed(1)

    for turn in LAYOUTS.values():
        anew()
        wanted = block(x)
        tangent = turn(torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2)))
        trained = {weight: p for weight, p in block.named_parameters() if p.requires_grad}
        first, *grads = torch.autograd.grad(wanted, [x, *trained.values()], tangent, allow_unused=True)
        for code in codes.values():
            anew()
            made, grad, sums, over = run(code, block, x, tangent)
            assert torch.equal(made, wanted)
            assert torch.equal(grad, first) and grad.stride() == first.stride()
            for weight, expected in zip(trained, grads, strict=True):
                got = sums.get(weight)
                assert got is None if expected is None else torch.equal(got, expected), weight
            assert max(over) <= 64, over  # single numbers, which a plan has room for
