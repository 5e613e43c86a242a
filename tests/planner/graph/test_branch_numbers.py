"""Code that takes a way by numbers of its data: what every way needs is in the plan, or the block is refused."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.errors import UserError
from planner.graph import EagerPair
from planner.measure.analysis import analyse_model
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from tests.planner.graph.test_operations import run
from tests.support.engine_plans import adamw, chain_of, resident_plan
from tests.support.families import assert_bitwise, trained
from tests.support.tiny_models import batch_of, make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)
CPU = torch.device("cpu")


class Block(nn.Module):
    """`way(block, x)` says what it computes."""

    def __init__(self, way) -> None:
        super().__init__()
        self.first, self.wide, self.back, self.way = nn.Linear(8, 8), nn.Linear(8, 200), nn.Linear(200, 8), way

    def forward(self, x):
        return self.way(self, self.first(x))


def costly(block, x):
    return x + block.back(torch.relu(block.wide(x)))


def by_truth(block, x):
    return costly(block, x) if x.abs().max() > 2 else x * 2


def by_number(block, x):
    return x * 2 if float(x.detach().sum()) > -1e3 else costly(block, x)


def twice(block, x):
    """The second choice is there in one way of the first only."""
    if x.detach().abs().max().item() > 2:
        x = costly(block, x)
        if x[0, 0, 0] > -1e3 and x[0, 0, 1] < -1e4:
            return x
        x = costly(block, costly(block, x))
    return x


def checking(block, x):
    """A number that must not be there ends it."""
    if not x.isfinite().all():
        raise ValueError("no")
    return 1 / float(x.detach().square().sum()) * x


def measured(way):
    block = Block(way)
    x = torch.randn(2, 4, 8)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(x).requires_grad_()
    return block, EagerPair.measured(block, (fake,), {}, name="block", reason="it looks at data")


@pytest.mark.parametrize("way", [by_truth, by_number, twice, checking])
def test_every_way_that_a_number_may_lead_is_within_the_bytes(way):
    block, code = measured(way)
    peaks = []
    for size in (0.01, 1.0, 1e2, -1e4):
        x = (size * torch.randn(2, 4, 8).abs()).requires_grad_()
        made, grad, _, over = run(code, block, x, torch.ones(2, 4, 8))
        assert torch.equal(made, block(x))
        assert torch.equal(grad, torch.autograd.grad(block(x).sum(), x)[0])
        peaks.append(over)
    assert max(map(max, peaks)) <= 64, peaks
    if way is by_truth:  # not far off, either
        assert max(forward for forward, *_ in peaks) >= -64, peaks


def test_code_without_numbers_needs_what_it_needs_at_first():
    (_, one), (_, other) = measured(costly), measured(by_truth)
    assert (one.forward_peak, one.backward_peak) == (other.forward_peak, other.backward_peak)


def looping(block, x):
    while x.abs().max() > 0.5:
        x = block.first(x) * 0.1
    return x


def shrinking(block, x):
    return x if x.sum() < 100 else x[:1]


def in_another_kind(block, x):
    return x if x.sum() < 100 else (x, x)


@pytest.mark.parametrize(
    ("way", "text"),
    [(looping, "decides how often it is run"), (shrinking, "other kinds, shapes"), (in_another_kind, "other kinds")],
)
def test_what_has_no_bound_is_refused(way, text):
    with pytest.raises(UserError, match=text) as told:
        measured(way)
    assert told.value.code == "block-depends-on-data"


def test_a_result_of_another_kind_is_not_taken_for_the_first_ones():
    block, code = measured(lambda block, x: x[: int((x.detach() < 1e3).all(-1).all(-1).sum())])
    x = torch.randn(2, 4, 8)
    primals = [*(p.detach() for p in block.parameters()), x]
    with torch.no_grad():
        code.forward(list(primals))
        primals[-1] = torch.cat([x[:1], x[1:] * 1e6])
        with pytest.raises(UserError, match="other kinds, shapes or gradients than before"):
            code.forward(primals)


def moody(by=0.5, name="llama"):
    """Layers whose MLP does more where its input is large, as that of random data is not."""
    model = make_model(name)
    for layer in model.model.layers:
        own = layer.mlp.forward
        layer.mlp.forward = lambda x, own=own: own(own(own(x))) if x.abs().max() > by else own(x)
    return model


@pytest.mark.sweep(2)
@pytest.mark.parametrize("slices", [1, 2])
def test_a_way_that_planning_did_not_take_stays_within_the_peak(slices):
    model = moody()
    chain = chain_of(model)
    plan = resident_plan(chain, slices=slices)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU, metered=True)
    result = engine.step([batch_of(k) for k in range(slices)], seeds=[0] * slices, learning_rate=1e-3)
    engine.close()
    assert result.peak_bytes <= gpu_peak_bytes(compile_program(plan, chain), chain)
    assert_bitwise(trained(moody, batch_of, slices=slices, steps=2))


def test_a_step_that_needs_more_than_the_budget_ends_and_leaves_the_weights():
    model, plain = make_model("llama"), make_model("llama")
    for layer in model.model.layers:
        own = layer.mlp.forward

        def forward(x, own=own):
            rows = int((x.detach().abs() > 0.5).sum())  # a count: nobody says how large it may be
            return own(x) + F.relu(x.new_ones(4096, rows)).sum() * 0

        layer.mlp.forward = forward
    chain = chain_of(model)
    plan = resident_plan(chain)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU, metered=True)
    with pytest.raises(UserError, match=r"(?s)model.layers.0 needs depends on.*were needed, the plan has") as e:
        engine.step([batch_of()], seeds=[0], learning_rate=1e-3)
    assert e.value.code == "block-depends-on-data"
    restored = dict(engine.restore().named_parameters())
    assert all(torch.equal(restored[name], p) for name, p in plain.named_parameters())


def counting(times):
    """Layers count their runs in one buffer, and compute with it."""
    model = make_model("llama")
    seen = torch.ones(())
    for layer in model.model.layers[:times]:
        own = layer.mlp.forward
        layer.mlp.register_buffer("seen", seen, persistent=False)
        layer.mlp.forward = lambda x, own=own, mlp=layer.mlp: own(x) * mlp.seen.add_(1).clone()
    return model


def test_blocks_that_change_one_buffer_take_one_micro_batch():
    analyse_model(counting(1), batch_of(), device=CPU).check_slices(2)
    shared = analyse_model(counting(2), batch_of(), device=CPU)
    shared.check_slices(1)
    with pytest.raises(UserError, match=r"(?s)model.layers.0 changes a buffer.*2 micro-batches.*\[buffer-shared\]"):
        shared.check_slices(2)
    assert_bitwise(trained(functools.partial(counting, 2), batch_of, slices=1, steps=2))
