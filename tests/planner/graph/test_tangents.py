"""Gradients that reach a block laid out otherwise than its results."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.cpu.meter import Meter
from planner.graph import RECIPES, Pair, make_pairs, trace_block
from planner.graph.tangents import Layout, layout_of
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from tests.support.engine_plans import adamw, chain_of, resident_plan
from tests.support.engines import CPU, assert_same_state, data
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)


def turned_in_the_loss(model):
    """Cross entropy as it wants its classes, second: the gradient of the logits comes back turned round."""

    def loss(logits, labels, vocab_size, num_items_in_batch=1, **rest):
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="sum") / num_items_in_batch

    model.loss_function = loss
    return model


def expanded_by_the_loss(model):
    model.loss_function = lambda logits, labels, vocab_size, **rest: logits.sum() / logits.numel()
    return model


def turned_between_layers(model):
    """The frame looks at time before rows, and normalizes: that norm's gradient has its own memory."""
    for layer in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
        layer.register_forward_hook(
            lambda module, args, out: F.layer_norm(out.transpose(0, 1).contiguous(), (32,)).transpose(0, 1)
        )
    return model


def normalized_in_groups(model):
    """Its layers end with a norm over groups of features, whose gradient wants its memory in order: autograd copies it
    unless it is laid out so, and the kernel reads it as if it were."""
    for layer in model.model.layers:
        norm, own = nn.GroupNorm(4, 32), layer.forward
        layer.norm = norm
        layer.forward = lambda *args, own=own, norm=norm, **kwargs: norm(
            own(*args, **kwargs).transpose(1, 2)
        ).transpose(1, 2)
    return model


CASES = [
    ("llama", normalized_in_groups, "keep", 1),
    ("llama", normalized_in_groups, "keep", 2),
    ("llama", turned_in_the_loss, "keep", 1),
    ("llama", expanded_by_the_loss, "keep", 1),
    ("llama", turned_between_layers, "offload", 2),
    ("gpt2", turned_between_layers, "recompute", 1),
]


@functools.cache
def chain_and_code(name, change):
    """The chain of the changed model, and room for the code that its engines share."""
    return chain_of(change(make_model(name))), {}


@pytest.mark.parametrize(("name", "change", "option", "slices"), CASES)
def test_a_frame_that_turns_gradients_trains_with_plain_bits_and_the_predicted_bytes(name, change, option, slices):
    model, plain_model = (change(make_model(name)) for _ in range(2))
    chain, code = chain_and_code(name, change)
    plan = resident_plan(chain, option=option, slices=slices)
    settings = {"optimizer": adamw(model), "max_grad_norm": None}
    engine = Engine(model, plan=plan, chain=chain, device=CPU, metered=True, **settings)
    engine._rounds.codes = code
    plain = PlainEngine(plain_model, **settings)
    predicted = gpu_peak_bytes(compile_program(plan, chain), chain)
    for step in range(2):
        batches, rest = data(step, slices)
        got, wanted = (each.step(batches, learning_rate=1e-2, **rest) for each in (engine, plain))
        assert all(torch.equal(a, b) for a, b in zip(got.losses, wanted.losses, strict=True))
        assert predicted - 1024 <= got.peak_bytes <= predicted  # scalars that a caller may still hold
    assert_same_state(engine, plain)
    engine.close()


def test_options_that_share_code_keep_to_themselves_for_gradients_as_traced_and_otherwise():
    joint = trace_block(nn.Linear(3, 5), (torch.ones(4, 3, requires_grad=True),), {})
    pairs = make_pairs(joint, RECIPES.values())
    assert len(pairs) == len(RECIPES)
    for pair in pairs.values():
        assert pair.for_tangents(layout_of(pair.tangent_values)) is pair
        assert pair.for_tangents(Layout(((1, 4),))).recipe is pair.recipe


class Scaled(nn.Linear):
    """Its code has a constant, which gradients meet; the weight's gradient is a sum over a turned tensor."""

    def __init__(self) -> None:
        super().__init__(8, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device=x.device)


class Grouped(nn.GroupNorm):
    """Over groups of features, which it looks at as if they came before time."""

    def __init__(self) -> None:
        super().__init__(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


ON_A_GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
@pytest.mark.parametrize(
    "turn",
    [
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t[:1, :1, :1].expand_as(t),
        lambda t: t.repeat(1, 1, 2)[..., ::2],
    ],
    ids=["turned", "expanded", "every other"],
)
@pytest.mark.parametrize("make", [Scaled, Grouped])
def test_code_for_other_gradients_is_eagers_and_needs_what_it_says(make, turn, device):
    block, x = make().to(device), torch.randn(3, 5, 8, device=device, requires_grad=True)
    pair = Pair(trace_block(block, (x,), {}), RECIPES["keep"])
    tangent = turn(torch.randn_like(block(x), memory_format=torch.contiguous_format))
    names, parameters = zip(*block.named_parameters(), strict=True)
    wanted = torch.autograd.grad(block(x), (x, *parameters), tangent)
    code = pair.for_tangents(layout_of([tangent]))
    assert code is not pair and code is pair.for_tangents(layout_of([tangent]))
    assert pair.for_tangents(layout_of(pair.tangent_values)) is pair
    primals = [*(p.detach() for p in parameters), x.detach()]
    meter, sums = Meter(device), {}
    results, states = pair.forward(list(primals))
    values = [*results[1:], *(primals[i] for i in pair.backward_primals), tangent]
    del results
    for tensor in values:
        meter.add(tensor)
    before = meter.now
    with meter.watch(), torch.no_grad():
        grads = code.backward(values, states, sums.__setitem__)
    assert meter.peak - before == code.backward_peak[True]
    assert torch.equal(grads[0], wanted[0])
    assert all(torch.equal(sums[name], grad) for name, grad in zip(names, wanted[1:], strict=True))
