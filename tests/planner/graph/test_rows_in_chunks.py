"""The losses of single rows from a head in chunks: their numbers, their gradients, and the memory of both passes."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.cpu.meter import Meter
from planner.errors import UserError
from planner.graph import RECIPES, ChunkedHead, Pair, loss_only, trace_block
from planner.graph.chunks import weighted_cross_entropy

torch.set_num_threads(1)
ROWS, LENGTH, WIDTH, VOCABULARY = 4, 8, 16, 96
POSITIONS = ROWS * LENGTH


class Head(ChunkedHead):
    """A head whose weights are always there."""

    def __init__(self, module, hidden, chunk):
        pair = Pair(trace_block(module, (hidden,), {}, name="head"), RECIPES["keep"])
        super().__init__(pair, [hidden], chunk)
        self.module = module
        self.logits = self.enter([hidden], {}, torch.zeros((), requires_grad=True))

    def weights(self):
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def gradients(self):
        """By name of the weight; "input" is the input's."""
        found = {}
        (of_input,) = self.finish(found.__setitem__)
        return found if of_input is None else {**found, "input": of_input}


def head_of(*, bias=False, frozen=(), dtype=torch.float32, vocabulary=VOCABULARY):
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, vocabulary, bias=bias, dtype=dtype)
    for name, p in module.named_parameters():
        p.requires_grad_(name not in frozen)
    return module


def hidden_of(dtype=torch.float32, *, trained=True):
    return torch.randn(ROWS, LENGTH, WIDTH, dtype=dtype).requires_grad_(trained)


def targets_of(vocabulary=VOCABULARY):
    targets = torch.randint(vocabulary, (ROWS, LENGTH))
    targets[:, :3] = targets[1, 5:] = -100
    return targets.view(-1)


def losses(logits, targets, cap=0.0):
    """The loss of each position, as models compute it."""
    if cap:
        logits = torch.tanh(logits / cap) * cap
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets, reduction="none")


def pairwise(each):
    """A loss that compares the sums of the first rows with those of the last ones."""
    good, bad = each.view(ROWS, LENGTH).sum(1).chunk(2)
    return F.softplus(0.3 * (good - bad)).mean() + 0.1 * good.mean()


def plain(module, hidden, targets, cap=0.0):
    """Losses and gradients by autograd over all logits."""
    each = losses(module(hidden), targets, cap)
    leaves = {name: p for name, p in (*module.named_parameters(), ("input", hidden)) if p.requires_grad}
    return each.detach(), dict(zip(leaves, torch.autograd.grad(pairwise(each), list(leaves.values())), strict=True))


@pytest.mark.parametrize("chunk", [1, 5, 16, 32, 100])
@pytest.mark.parametrize(
    "settings",
    [{}, {"bias": True}, {"frozen": ("weight",)}, {"bias": True, "frozen": ("weight",)}, {"cap": 2.0}],
    ids=["weight", "bias", "frozen", "bias-alone", "capped"],
)
def test_losses_and_gradients_are_those_of_autograd_over_all_logits(settings, chunk):
    settings = dict(settings)
    cap, module, hidden, targets = settings.pop("cap", 0.0), head_of(**settings), hidden_of(), targets_of()
    call = Head(module, hidden, chunk)
    each = losses(call.logits, targets, cap)
    pairwise(each).backward()
    found = call.gradients()
    expected, gradients = plain(module, hidden, targets, cap)
    assert type(each) is torch.Tensor and (each.shape, each.dtype) == ((POSITIONS,), torch.float32)
    assert not each[targets == -100].any()
    torch.testing.assert_close(each.detach(), expected, rtol=1e-6, atol=1e-6)
    assert found.keys() == gradients.keys() and found["input"].shape == hidden.shape
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() < 1e-6 * gradient.norm(), name


@pytest.mark.parametrize("trained", [True, False], ids=["with-input", "head-alone"])
def test_in_bf16_gradients_are_as_near_to_fp32_as_those_of_autograd(trained):
    module, hidden, targets = head_of(dtype=torch.bfloat16), hidden_of(torch.bfloat16, trained=trained), targets_of()
    call = Head(module, hidden, 5)
    pairwise(losses(call.logits, targets)).backward()
    found, (_, in_bf16) = call.gradients(), plain(module, hidden, targets)
    _, exact = plain(module.float(), hidden.detach().float().requires_grad_(trained), targets)
    assert found.keys() == exact.keys() == ({"weight", "input"} if trained else {"weight"})
    for name, gradient in exact.items():
        assert found[name].dtype == torch.bfloat16
        assert (found[name] - gradient).norm() < 1.25 * (in_bf16[name] - gradient).norm(), name


def test_a_sum_of_weighted_rows_is_the_weighted_sum():
    module, hidden, targets, shares = head_of(bias=True), hidden_of(), targets_of(), torch.rand(POSITIONS)
    one, other = Head(module, hidden, 5), Head(module, hidden, 5)
    first = (losses(one.logits, targets) * shares).sum() / 7
    second = weighted_cross_entropy(other.logits.view(-1, VOCABULARY), targets, shares, -100) / 7
    torch.testing.assert_close(first, second, rtol=1e-6, atol=0)
    first.backward()
    second.backward()
    mine, its = one.gradients(), other.gradients()
    for name in ("weight", "bias", "input"):
        torch.testing.assert_close(mine[name], its[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reductions", [("none", "none"), ("none", "sum"), ("sum", "none"), ("none", "mean")])
def test_a_second_loss_is_refused_whatever_its_reduction(reductions):
    targets, call = targets_of(), Head(head_of(), hidden_of(), 5)
    flat, (first, second) = call.logits.view(-1, VOCABULARY), reductions
    F.cross_entropy(flat, targets, reduction=first)
    with pytest.raises(UserError, match="uses its logits for more than one loss") as told:
        F.cross_entropy(flat, targets, reduction=second)
    assert told.value.code == "loss-not-in-chunks"


def test_rows_that_the_loss_does_not_use_are_refused():
    call = Head(head_of(), hidden_of(), 5)
    losses(call.logits, targets_of())
    with pytest.raises(UserError, match="something else than the loss"):
        call.gradients()


@pytest.mark.parametrize("bias", [False, True])
def test_evaluation_gives_the_losses_of_rows_without_a_graph(bias):
    module, hidden, targets = head_of(bias=bias), hidden_of(trained=False), targets_of()
    with torch.no_grad():
        expected = losses(module(hidden), targets, cap=2.0)
        each = losses(loss_only(module, 5)(hidden), targets, cap=2.0)
    assert not each.requires_grad and each.dtype == torch.float32
    torch.testing.assert_close(each, expected, rtol=1e-6, atol=1e-6)


def test_no_pass_holds_more_than_a_chunks_logits_and_the_input_goes_before_gradients_are_handed_on():
    vocabulary, chunk = 4096, 2
    module, targets = head_of(frozen=("weight",), vocabulary=vocabulary), targets_of(vocabulary)
    meter, source = Meter(), hidden_of()
    chunk_bytes, all_bytes = chunk * vocabulary * 4, POSITIONS * vocabulary * 4
    with meter.host():
        meter.add(module.weight)
    with meter.watch():
        hidden = source * 1
        call = Head(module, hidden, chunk)
        before = meter.now
        meter.reset_peak()
        loss = pairwise(losses(call.logits, targets))
        forward, kept = meter.peak - before, meter.now - before
        loss.backward()
        meter.reset_peak()
        alive = weakref.ref(hidden.untyped_storage())
        call.logits = hidden = None
        assert alive() is not None  # backward reads it
        (gradient,) = call.finish(lambda *_: None)
        backward = meter.peak - before
        assert alive() is None
    assert gradient.shape == source.shape
    assert kept < chunk_bytes  # a few numbers for each row
    assert forward < 3 * chunk_bytes + kept < all_bytes / 4
    assert chunk_bytes < backward < 5 * chunk_bytes < all_bytes / 3
