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
    "features first": lambda t: t.transpose(1, -1).contiguous().transpose(1, -1),
    "expanded": lambda t: t[:1, :1].expand_as(t),
}


class Block(nn.Module):
    """The operation behind a layer, which needs its gradient, and whose result may be laid out in another order."""

    def __init__(self, name: str, *, turned: bool = False, in_order: bool = False) -> None:
        """`in_order`: what is below is a group norm, whose backward reads its gradient as if it lay in order."""
        super().__init__()
        self.first = Part("group norm", 8) if in_order else nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.part, self.turned = Part(name, 8), turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.part(x.transpose(1, 2).contiguous().transpose(1, 2) if self.turned else x)


def codes_of(block, x, *, autocast=False):
    """The code of each way to run the block, by name."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        try:
            joint = trace_block(block, (x,), {})
        except UserError as error:
            return {"eager": EagerPair.measured(block, (x,), {}, name="block", reason=error.what)}
        return make_pairs(joint, [RECIPES["keep"], RECIPES["recompute"]])


def run(code, block, x, tangent):
    """Result, the input's gradient, the weights' by name; by how much forward and backward exceed what is said, and
    what is held when all is done. As the engine has it, the block's own weights are NaN meanwhile."""
    meter, sums, buffers = Meter(), {}, [b.clone() for b in block.buffers()]
    own = [(p, p.data) for p in block.parameters()]
    primals = [*(data.clone() for _, data in own), *buffers, x.detach()]
    for p, data in own:
        p.data = data.new_full((), torch.nan).expand(data.shape)
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
    del primals, values, states, buffers
    there = (x, tangent, made, grad, *(g for g in sums.values() if g is not None))
    sizes = {t.untyped_storage()._cdata: meter.bytes_of(t) for t in there}
    over.append(meter.now - sum(sizes.values()))
    for p, data in own:
        p.data = data
    return made, grad, sums, over


@pytest.mark.sweep(4)
@pytest.mark.parametrize("turned", [False, True], ids=["in order", "turned"])
@pytest.mark.parametrize("name", ALL)
def test_an_operation_has_the_bits_of_plain_pytorch_and_the_bytes_that_are_said(name, turned):
    codes = check(name, turned=turned)
    assert turned or ("eager" in codes) == (name in OWN_CODE)  # what is turned in place is not traced


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", ALL)
def test_an_operation_above_a_group_norm_has_the_bits_of_plain_pytorch_and_the_bytes_that_are_said(name):
    check(name, in_order=True)


@pytest.mark.parametrize("name", ["mlp", "tanh", "glu", "twice", "attention", "layer norm", "rnn", "gru", "counted"])
def test_an_operation_under_autocast_has_the_bits_of_plain_pytorch_and_the_bytes_that_are_said(name):
    codes = check(name, autocast=True)
    assert ("eager" in codes) == (name in OWN_CODE or name in ("twice", "rnn"))  # one cast of a weight for two uses


@pytest.mark.parametrize("name", ["mlp", "convolution", "convolution per feature", "layer norm", "group norm"])
def test_an_operation_whose_weights_are_frozen_but_not_its_biases_has_the_bytes_that_are_said(name):
    check(name, frozen="weight")


def layouts_of(name, *settings):
    """Two of the layouts: the plain one, and of the others a different one in each of an operation's tests."""
    others = list(LAYOUTS)[1:]
    return [LAYOUTS["in order"], LAYOUTS[others[(list(ALL).index(name) + sum(settings)) % len(others)]]]


def check(name, *, turned=False, in_order=False, autocast=False, frozen=None):
    """Runs the block as it is and by its codes, which are returned. `frozen`: no weight of that name is trained."""
    torch.manual_seed(0)
    block, x = Block(name, turned=turned, in_order=in_order), torch.randn(2, 4, 8, requires_grad=True)
    for weight, p in block.part.named_parameters():
        p.requires_grad_(p.requires_grad and weight.rpartition(".")[2] != frozen)
    codes, buffers = codes_of(block, x, autocast=autocast), [b.clone() for b in block.buffers()]

    def anew():
        for buffer, before in zip(block.buffers(), buffers, strict=True):
            buffer.copy_(before)
        torch.manual_seed(1)

    for turn in layouts_of(name, turned, 2 * in_order):
        anew()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            wanted = block(x)
        tangent = turn(torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2)).to(wanted.dtype))
        trained = {weight: p for weight, p in block.named_parameters() if p.requires_grad}
        first, *grads = torch.autograd.grad(wanted, [x, *trained.values()], tangent, allow_unused=True)
        for code in codes.values():
            anew()
            made, grad, sums, over = run(code, block, x, tangent)
            assert torch.equal(made, wanted) and made.stride() == wanted.clone().stride()
            assert torch.equal(grad, first) and grad.stride() == first.stride()
            for weight, expected in zip(trained, grads, strict=True):
                got = sums.get(weight)
                assert got is None if expected is None else torch.equal(got, expected), weight
            assert max(over) <= 64, over  # single numbers, which a plan has room for
    return codes
