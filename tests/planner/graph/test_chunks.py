"""Head and loss in chunks of rows: how near to plain PyTorch, and how much less memory."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.errors import UserError
from planner.graph.chunks import ChunkedLogits, chunk_rows
from planner.measure.analysis import analyse_model, measure_times
from planner.measure.machine_rates import estimate_hardware
from planner.measure.times import OptionTimes, Times
from planner.schedule.compile import compile_program
from planner.schedule.forward_program import forward_peak_bytes
from planner.schedule.memory_use import gpu_peak_bytes
from tests.support.engine_plans import adamw, mixed_plan, resident_plan
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import NAMES, batch_of, make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)
CPU = torch.device("cpu")
PAIRS = {}  # generated code is shared by kind and shapes


def chunked_chain(model, chunk, **shape):
    analysis = analyse_model(model, batch_of(**shape), device=CPU, chunk_rows=chunk)
    times = (OptionTimes(kind=k, option=o, forward_s=1.0, backward_s=2.0) for k, p in analysis.pairs.items() for o in p)
    return analysis.chain(Times(options=tuple(times), device="none", measured=False))


@functools.cache
def chain_for(name, dtype, rows):
    return chunked_chain(make_model(name, dtype), rows)


@pytest.fixture
def make():
    """make(name, rows of a chunk, plan function, …) -> engine."""
    engines = []

    def build(name, rows, plan_of=mixed_plan, *, slices=1, dtype=torch.float32):
        model, a_chain = make_model(name, dtype), chain_for(name, dtype, rows)
        plan = plan_of(a_chain, slices=slices, clip=True)
        engine = Engine(
            model, plan=plan, chain=a_chain, optimizer=adamw(model), max_grad_norm=1.0, device=CPU, metered=True
        )
        engine._rounds.codes = PAIRS
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def plain_engine(name, dtype=torch.float32):
    model = make_model(name, dtype)
    return PlainEngine(model, optimizer=adamw(model), max_grad_norm=1.0)


def step(engine, slices, padded=(1,)):
    """One step; the losses' sum and the first moments, which are a tenth of the clipped gradients."""
    data = [batch_of(k, padded=k in padded) for k in range(slices)]
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in data)
    given = {"seeds": list(range(slices)), "learning_rate": 1e-3, "num_items_in_batch": torch.tensor(count)}
    result = engine.step(data, **given)
    loss = float(torch.stack([loss.detach().double() for loss in result.losses]).sum())
    return loss, {name: parts["exp_avg"].double().clone() for name, parts in engine.state()}, result


def distance(one, other):
    """The greatest difference of two gradients in the norm of each tensor."""
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("rows", [7, 64])
@pytest.mark.parametrize("name", NAMES)
def test_in_fp32_losses_and_gradients_are_within_a_millionth_of_plain_pytorch(make, name, rows, slices):
    loss, gradients, _ = step(make(name, rows, slices=slices), slices)
    plain_loss, expected, _ = step(plain_engine(name), slices)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert distance(gradients, expected) < 2e-6


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_in_bf16_they_are_as_near_to_fp32_as_those_of_plain_pytorch(make, name):
    engine, plain, exact = make(name, 7, slices=2, dtype=torch.bfloat16), plain_engine(name, torch.bfloat16), None
    model = make_model(name, torch.bfloat16).float()
    exact = PlainEngine(model, optimizer=adamw(model), max_grad_norm=1.0)
    engine._rounds.codes = {}  # that of other tests has dropout
    for each in (engine._model, plain.model, model):
        for module in each.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    (loss, gradients, _), (plain_loss, expected, _), (true_loss, true, _) = (step(e, 2) for e in (engine, plain, exact))
    assert abs(loss - true_loss) < 1.5 * abs(plain_loss - true_loss) + 1e-3 * true_loss
    assert distance(gradients, true) < 1.25 * distance(expected, true)


@pytest.mark.parametrize("rows", [0, 7], ids=["whole", "chunks"])
def test_the_loss_is_the_mean_over_all_tokens_however_slices_share_them(make, rows):
    """Three micro-batches with 30, 24 and no tokens to predict, and one of all their rows."""
    data = [batch_of(k, padded=k == 1) for k in range(3)]
    data[2]["labels"].fill_(-100)
    engine, plain = make("llama", rows, slices=3), plain_engine("llama")
    engine._rounds.codes = {}  # that of other tests has dropout
    for module in (*engine._model.modules(), *plain.model.modules()):
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    given = {"learning_rate": 1e-3, "num_items_in_batch": torch.tensor(54)}
    sliced = engine.step(data, seeds=[1, 2, 3], **given)
    whole = plain.step([{name: torch.cat([b[name] for b in data]) for name in data[0]}], seeds=[1], **given)
    assert float(sliced.losses[2]) == 0.0
    assert float(sum(sliced.losses)) == pytest.approx(float(whole.losses[0]), rel=1e-6)
    assert float(sliced.grad_norm) == pytest.approx(float(whole.grad_norm), rel=1e-5)


@pytest.mark.parametrize("frozen", [("lm_head", "model.norm"), ("embed_tokens", "layers.", "model.norm")], ids=str)
def test_a_frozen_head_and_a_head_alone_are_trained_rightly(frozen):
    model, plain = make_model("llama"), make_model("llama")
    for name, p in (*model.named_parameters(), *plain.named_parameters()):
        p.requires_grad_(not any(part in name for part in frozen))
    a_chain = chunked_chain(model, 7)
    settings = {"optimizer": adamw(model), "max_grad_norm": 1.0}
    engine = Engine(model, plan=resident_plan(a_chain, slices=2, clip=True), chain=a_chain, device=CPU, **settings)
    loss, gradients, _ = step(engine, 2)
    plain_loss, expected, _ = step(PlainEngine(plain, **settings), 2)
    engine.close()
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert gradients.keys() == expected.keys() and distance(gradients, expected) < 2e-6


def test_micro_batches_without_a_label_to_learn_add_nothing(make):
    engine, plain = make("llama", 7, slices=3), plain_engine("llama")
    data = [batch_of(k) for k in range(3)]
    data[1]["labels"].fill_(-100)
    given = {"seeds": [1, 2, 3], "learning_rate": 1e-3, "num_items_in_batch": torch.tensor(60)}
    got, expected = engine.step(data, **given), plain.step(data, **given)
    assert float(got.losses[1]) == float(expected.losses[1]) == 0.0
    torch.testing.assert_close(torch.stack(list(got.losses)), torch.stack(expected.losses), rtol=1e-6, atol=0)
    torch.testing.assert_close(got.grad_norm, expected.grad_norm, rtol=2e-6, atol=0)


def test_the_peak_is_a_fraction_and_is_the_one_predicted():
    shape = {"rows": 2, "length": 64, "vocabulary": 4096}
    peaks = {}
    for chunk in (0, 16):
        model = make_model("llama", vocabulary=4096)
        a_chain = chunked_chain(model, chunk, **shape)
        plan = resident_plan(a_chain)
        engine = Engine(
            model, plan=plan, chain=a_chain, optimizer=adamw(model), max_grad_norm=None, device=CPU, metered=True
        )
        result = engine.step([batch_of(**shape)], seeds=[1], learning_rate=1e-3, num_items_in_batch=torch.tensor(126))
        engine.close()
        predicted = gpu_peak_bytes(compile_program(plan, a_chain), a_chain)
        assert predicted - 2048 <= result.peak_bytes <= predicted
        peaks[chunk] = a_chain.blocks[-1].options[0].forward_peak_bytes
    logits = 2 * 64 * 4096 * 4
    assert peaks[0] > 3 * logits
    assert peaks[16] < logits


def test_the_time_measured_is_that_of_chunks():
    analysis = analyse_model(
        make_model("llama", vocabulary=4096), batch_of(rows=2, length=64, vocabulary=4096), device=CPU, chunk_rows=16
    )
    head = analysis.names.kinds[-1]
    made = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.extend(tuple(t.shape) for t in tree_leaves(result) if torch.is_tensor(t) and t.dim() == 2)
            return result

    with Watched():
        times = measure_times(analysis, CPU, estimate_hardware(CPU), slices=1)
    assert times.of(head, "keep").forward_s > 0 == times.of(head, "keep").backward_s
    assert {shape for shape in made if shape[1] == 4096} == {(16, 4096), (32, 4096)}  # a chunk; the weight, turned


def test_evaluation_in_chunks_stays_within_what_is_predicted_and_generation_is_as_ever(make):
    engine, plain = make("llama", 7), plain_engine("llama")
    data = [batch_of(k, padded=k == 1) for k in range(3)]
    got, expected = engine.evaluate(data), plain.evaluate(data)
    torch.testing.assert_close(torch.stack(list(got.losses)), torch.stack(expected.losses), rtol=1e-6, atol=0)
    forward = engine._forward_only
    measured = forward._measure(data)
    assert got.peak_bytes <= forward_peak_bytes(forward._program(measured, 3), engine._forward_only._chain, measured)
    prompts = [[5, 6, 7], [9]]
    assert engine.generate(prompts, new_tokens=8, pad=0) == plain.generate(prompts, new_tokens=8, pad=0)


class Curious(nn.Module):
    """Looks at a model's logits in its own way."""

    def __init__(self, model, look):
        super().__init__()
        self.model, self.look = model, look

    def forward(self, **kwargs):
        result = self.model(**kwargs)
        self.look(result.logits)
        return result

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()


@pytest.mark.parametrize(
    "look", [lambda x: x.softmax(-1), lambda x: x[:, -1], lambda x: x + torch.ones(1)], ids=range(3)
)
def test_a_model_that_does_something_else_with_its_logits_is_refused(look):
    with pytest.raises(UserError, match=r"(?s)cannot be computed in chunks.*exact: true.*loss-not-in-chunks"):
        analyse_model(Curious(make_model("llama"), look), batch_of(), device=CPU, chunk_rows=8)


@pytest.mark.parametrize("frozen", ["lm_head", "model."])
def test_a_sum_of_two_losses_of_the_same_logits_is_refused(frozen):
    def twice(logits, labels, vocab_size, **given):
        logits, labels = logits.view(-1, vocab_size), labels.view(-1)
        return nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits, labels.flip(0))

    model = make_model("llama")
    model.loss_function = twice
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    with pytest.raises(UserError, match="uses its logits for more than one loss") as told:
        analyse_model(model, batch_of(), device=CPU, chunk_rows=8)
    assert told.value.code == "loss-not-in-chunks"


def test_a_soft_cap_is_applied_chunk_by_chunk():
    seen = []

    def loss(scored, *, each):
        value = scored.inputs @ torch.ones(4, 6)
        for one in scored.post:
            value = one(value)
        seen.append(value)
        return value.sum()

    hidden = torch.arange(8.0).view(1, 2, 4)
    logits = ChunkedLogits.of(hidden, 6, loss)
    capped = torch.tanh(logits / 3.0) * 3.0
    assert (capped.shape, capped.dtype) == ((1, 2, 6), torch.float32)
    nn.functional.cross_entropy(capped.float().view(-1, 6), torch.zeros(2, dtype=torch.int64), reduction="sum")
    assert torch.equal(seen[0], torch.tanh(hidden[0] @ torch.ones(4, 6) / 3.0) * 3.0)


def test_a_chunks_logits_take_a_quarter_of_the_weights_gradient():
    heads = [torch.empty(4, width, device="meta", requires_grad=True) for width in (64, 1024, 4096)]
    assert [chunk_rows(weight) for weight in heads] == [128, 256, 1024]


def test_a_frozen_heads_chunks_are_no_larger_than_a_card_needs_them_to_compute_at_its_rate():
    heads = [torch.empty(4, width, device="meta") for width in (64, 1024, 4096)]
    assert [chunk_rows(weight) for weight in heads] == [128, 256, 256]
