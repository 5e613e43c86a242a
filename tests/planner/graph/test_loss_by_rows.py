"""The loss a few rows at a time: the bits of plain PyTorch, in a fraction of the memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.errors import UserError
from planner.graph import loss_by_rows
from planner.graph.loss_by_rows import RowLogits, logits_by_rows
from planner.measure.analysis import analyse_model
from planner.measure.times import OptionTimes, Times
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from tests.support.engine_plans import adamw, mixed_plan, resident_plan
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import NAMES, batch_of, make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)
CPU = torch.device("cpu")
SOFT_CAP = (lambda x: x / 30, torch.tanh, lambda x: x * 30, lambda x: x.float())


@pytest.fixture(autouse=True)
def some_rows(monkeypatch):
    """64 rows are computed at a time, whatever the vocabulary."""
    monkeypatch.setattr(loss_by_rows, "_ELEMENTS", 1)


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def loss_and_gradient(logits, target, post, reduction, ignored, *, rows):
    leaf = logits.clone().requires_grad_()
    value = leaf * 1
    value = logits_by_rows(value) if rows else value
    assert isinstance(value, RowLogits) == rows
    for step in post:
        value = step(value)
    loss = F.cross_entropy(value.view(-1, value.shape[-1]), target, ignore_index=ignored, reduction=reduction)
    if reduction == "none":
        loss = (loss * torch.linspace(0, 2, len(target))).sum()
    loss = loss / 411.3
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("post", [(), (lambda x: x.float(),), SOFT_CAP], ids=["none", "float", "soft cap"])
def test_loss_and_gradient_have_the_bits_of_plain_pytorch(dtype, post):
    sizes, losses = ((50, 5), (257, 64), (1000, 129), (32001, 70)), (("sum", -100), ("mean", -100), ("none", 7))
    for (vocabulary, rows), (reduction, ignored) in itertools.product(sizes, losses):
        torch.manual_seed(rows)
        logits, target = (torch.randn(2, rows, vocabulary) * 4).to(dtype), torch.randint(0, vocabulary, (2 * rows,))
        target[torch.rand(2 * rows) < 0.3] = ignored
        given = logits, target, post, reduction, ignored
        (loss, gradient), (plain_loss, plain_gradient) = (loss_and_gradient(*given, rows=r) for r in (True, False))
        assert torch.equal(loss, plain_loss), (vocabulary, rows, reduction)
        assert torch.equal(bits(gradient), bits(plain_gradient)), (vocabulary, rows, reduction)


@pytest.mark.gpu(real=True)
def test_on_a_card_they_have_the_bits_of_plain_pytorch():
    for vocabulary, rows, dtype in itertools.product((50257, 128256), (100, 517), (torch.bfloat16, torch.float32)):
        logits = (torch.randn(1, rows, vocabulary, device="cuda") * 4).to(dtype)
        target = torch.randint(0, vocabulary, (rows,), device="cuda")
        target[::3] = -100
        given = logits, target, (lambda x: x.float(),), "sum", -100
        (loss, gradient), (plain_loss, plain_gradient) = (loss_and_gradient(*given, rows=r) for r in (True, False))
        assert torch.equal(loss, plain_loss) and torch.equal(bits(gradient), bits(plain_gradient)), (vocabulary, rows)


def chain_of(model, **shape):
    analysis = analyse_model(model, batch_of(**shape), device=CPU)
    times = (OptionTimes(kind=k, option=o, forward_s=1.0, backward_s=2.0) for k, p in analysis.pairs.items() for o in p)
    return analysis.chain(Times(options=tuple(times), device="none", measured=False))


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_has_the_bits_of_plain_pytorch_where_the_loss_takes_several_turns(name):
    shape = {"rows": 3, "length": 50}
    model, plain = make_model(name, torch.bfloat16), make_model(name, torch.bfloat16)
    chain = chain_of(model, **shape)
    settings = {"optimizer": adamw(model), "max_grad_norm": 1.0}
    engine = Engine(model, plan=mixed_plan(chain, slices=2, clip=True), chain=chain, device=CPU, **settings)
    data = [batch_of(k, padded=k == 1, **shape) for k in range(2)]
    given = {"seeds": [1, 2], "learning_rate": 1e-3, "num_items_in_batch": torch.tensor(250)}
    result, expected = engine.step(data, **given), (reference := PlainEngine(plain, **settings)).step(data, **given)
    evaluated, plainly = engine.evaluate(data), reference.evaluate(data)
    states, plain_states = dict(engine.state()), dict(reference.state())
    engine.close()
    assert list(map(float, result.losses)) == list(map(float, expected.losses))
    assert list(map(float, evaluated.losses)) == list(map(float, plainly.losses))
    assert states.keys() == plain_states.keys()
    for key, parts in states.items():
        assert torch.equal(parts["exp_avg"], plain_states[key]["exp_avg"]), key


def test_the_peak_is_a_fraction_and_is_the_one_predicted():
    shape = {"rows": 2, "length": 512, "vocabulary": 4096}
    model = make_model("llama", torch.bfloat16, vocabulary=4096)
    chain = chain_of(model, **shape)
    plan = resident_plan(chain)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU, metered=True)
    result = engine.step([batch_of(**shape)], seeds=[1], learning_rate=1e-3, num_items_in_batch=torch.tensor(1022))
    evaluated = engine.evaluate([batch_of(**shape)])
    engine.close()
    predicted, logits = gpu_peak_bytes(compile_program(plan, chain), chain), 2 * 512 * 4096 * 2
    assert predicted - 2048 <= result.peak_bytes <= predicted
    assert chain.blocks[-1].options[0].forward_peak_bytes < 1.7 * logits, "plain PyTorch needs seven times the logits"
    assert evaluated.peak_bytes < 2 * logits


def other_loss(logits, labels):
    """A loss that is no call of cross entropy."""
    picked = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])
    return -(picked[..., 0] * (labels >= 0)).sum() / 30


def smoothed(logits, labels):
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1), label_smoothing=0.1)


def both(logits, labels):
    as_fp32 = logits.float()
    return as_fp32.logsumexp(-1).square().mean() + F.cross_entropy(as_fp32.view(-1, logits.shape[-1]), labels.view(-1))


def beside(logits, labels):
    """A loss, and a figure about the logits that has no gradient."""
    loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))
    with torch.no_grad():
        beside.right = (logits.argmax(-1) == labels).float().mean()
        beside.kept = logits.detach()
    return loss


def entropy_of(logits, labels, **rest):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **rest)


def written_over(logits, labels):
    """New logits are changed in place, without a gradient."""
    scaled = logits * 2.0
    with torch.no_grad():
        scaled.view(-1, scaled.shape[-1]).clamp_(-1, 1)
        scaled[..., 5] = -3
    return entropy_of(scaled, labels)


def written_over_later(logits, labels):
    """Others have been computed from the logits that are changed in place."""
    scaled, seen = logits * 2.0, logits.detach()
    logits.div_(3.0)
    seen.clamp_(-1, 1)
    return entropy_of(scaled, labels) + entropy_of(logits, labels)


def written_over_uncounted(logits, labels):
    scaled, seen = logits * 2.0, logits.data
    seen.clamp_(-1, 1)
    return entropy_of(scaled, labels) + entropy_of(logits * 2.0, labels)


def figure_first(logits, labels):
    """A figure without a gradient, and then a gradient through the same logits."""
    as_fp32 = logits.float()
    with torch.no_grad():
        figure = as_fp32.max()
    return as_fp32.logsumexp(-1).square().mean() + entropy_of(as_fp32, labels) + figure


def figures_with_gradients_enabled(logits, labels):
    loss = entropy_of(logits.float(), labels)
    return loss + (logits.argmax(-1) == labels).float().mean()


def made_without_gradient(logits, labels):
    with torch.no_grad():
        constant = logits * 2.0
    return entropy_of(constant, labels) + entropy_of(logits, labels)


def three_gradients(logits, labels):
    """The gradients are added up in the order in which the model computes the three."""
    scaled = logits * 3.0
    return logits.square().mean() + logits.tanh().sum() / 10 + entropy_of(scaled, labels)


def under_autocast(logits, labels):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return entropy_of(logits, labels)


def transposed(logits, labels):
    return F.cross_entropy(logits.mT, labels)


def other_words(logits, labels):
    """The same calls with other words."""
    assert "Tensor" in logits.type()
    rows = torch.reshape(logits.to(labels.device).to("cpu", torch.float32), shape=(-1, logits.shape[-1]))
    return F.cross_entropy(input=rows, target=labels.view(-1))


OTHER_USES = [
    other_loss,
    smoothed,
    both,
    beside,
    written_over,
    written_over_later,
    written_over_uncounted,
    figure_first,
    figures_with_gradients_enabled,
    made_without_gradient,
    three_gradients,
    under_autocast,
    transposed,
    other_words,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", OTHER_USES, ids=lambda loss: loss.__name__)
def test_other_uses_of_the_logits_give_the_bits_of_plain_pytorch(loss, dtype):
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 40, 97).to(dtype), torch.randint(-1, 97, (2, 40))
    labels[labels < 0] = -100
    found, evaluated = [], []
    for wrap in (lambda value: value, logits_by_rows):
        with torch.no_grad():
            evaluated.append(loss(wrap(logits.clone()), labels))
        leaf = logits.clone().requires_grad_()
        result = loss(wrap(leaf * 1), labels)
        found.append((result.detach(), *torch.autograd.grad(result, leaf)))
    assert torch.equal(bits(found[0][1]), bits(found[1][1]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(*evaluated)
    if loss is beside:
        assert torch.equal(beside.kept, logits), "backward has overwritten what the model keeps"


def test_logits_that_are_gone_are_neither_read_nor_missed():
    labels = torch.zeros(2, 4, dtype=torch.long)
    value = logits_by_rows(torch.zeros(2, 4, 9, requires_grad=True) * 1)
    entropy_of(value, labels).backward()
    with pytest.raises(UserError, match="logits-changed"):  # backward has written their gradient over them
        value.detach()
    value = logits_by_rows(torch.zeros(2, 4, 9, requires_grad=True) * 1)
    entropy_of(value, labels)
    with pytest.raises(UserError, match="logits-changed"), torch.no_grad():
        value.div_(2)


def test_labels_of_another_shape_are_refused_as_in_plain_pytorch():
    value = logits_by_rows(torch.zeros(2, 4, 9))
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(value.view(-1, 9), torch.zeros(7, dtype=torch.long))


def test_two_losses_of_the_same_logits_are_refused_and_not_added_otherwise_than_in_plain_pytorch():
    def twice(logits, labels, vocab_size, **given):
        logits, labels = logits.float().view(-1, vocab_size), labels.view(-1)
        return F.cross_entropy(logits, labels) + F.cross_entropy(logits, labels.flip(0))

    model = make_model("llama")
    model.loss_function = twice
    with pytest.raises(UserError, match="more than its loss from its logits") as told:
        analyse_model(model, batch_of(), device=CPU)
    assert told.value.code == "logits-read-again"


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return torch.ones(())

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones(1, 4, 9)


def test_a_gradient_for_logits_without_data_is_not_lost():
    value = logits_by_rows(torch.zeros(1, 4, 9, requires_grad=True) * 1)
    with pytest.raises(UserError, match=r"(?s)operations do not show.*logits-not-seen"):
        Hidden.apply(value).backward()


def test_a_head_whose_output_is_kept_by_the_block_itself_is_not_overwritten():
    class Squashed(nn.Linear):
        def forward(self, value):
            return torch.tanh(super().forward(value))  # its backward reads its result

    model = make_model("llama")
    head = model.lm_head
    model.lm_head = Squashed(head.in_features, head.out_features, bias=False)
    model.lm_head.weight = head.weight
    analysis = analyse_model(model, batch_of(), device=CPU)
    codes = analysis.pairs[analysis.names.kinds[-1]].values()
    assert not any(code.gives_outputs_away for code in codes)
    plain = analyse_model(make_model("llama"), batch_of(), device=CPU)
    assert all(code.gives_outputs_away for code in plain.pairs[plain.names.kinds[-1]].values())
