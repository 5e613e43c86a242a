from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.cpu.meter import Meter
from planner.errors import UserError
from planner.graph import RECIPES, Pair, make_pairs, trace_block
from tests.support.tiny_models import NAMES, batch_of, make_model

torch.set_num_threads(1)


def call_of(name, dtype=torch.float32, dropout=0.1):
    """One layer of a tiny model and the arguments it is called with."""
    model = make_model(name, dtype, dropout=dropout)
    layer = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[1]
    calls = []
    hook = layer.register_forward_pre_hook(lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    model(**batch_of())
    hook.remove()
    return layer, *calls[0]


def detached(tree):
    return tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), tree)


def eager(layer, args, kwargs):
    args, kwargs = detached((args, kwargs))
    torch.manual_seed(7)
    out = layer(*args, **kwargs)
    out = out if torch.is_tensor(out) else out[0]
    tangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    leaves = [t for t in leaves_of(args, kwargs) if t.requires_grad]
    params = dict(layer.named_parameters())
    grads = torch.autograd.grad(out, [*leaves, *params.values()], tangent)
    return out.detach(), tangent, grads[: len(leaves)], dict(zip(params, grads[len(leaves) :], strict=True))


def leaves_of(*trees):
    return [t for t in tree_leaves(trees) if torch.is_tensor(t)]


def bytes_under(tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def run_pair(pair, layer, args, kwargs, tangent, meter):
    tensors = [t.detach() for t in leaves_of(args, kwargs)]
    weights = [p.detach() for p in layer.parameters()]
    primals = [*weights, *layer.buffers(), *tensors]
    grads, peaks = {}, {}
    for t in [*primals, tangent]:
        with meter.host():
            meter.add(t)
    torch.manual_seed(7)
    with meter.watch(), torch.no_grad():
        start = meter.now
        meter.mark()
        results, states = pair.forward(list(primals))
        peaks["forward"] = meter.mark() - start
        outputs, saved = results[: pair.n_outputs], results[pair.n_outputs :]
        assert len(saved) == len(pair.saved)
        del results
        before = meter.now
        assert bytes_under(saved) == pair.saved_bytes and bytes_under(outputs) == pair.output_bytes
        assert before - start == bytes_under([*saved, *outputs])
        # bloom returns its attention weights as well; they get no gradient
        differentiable = pair.joint.result.differentiable[1:]
        rest = [torch.zeros_like(o) for o, d in zip(outputs[1:], differentiable, strict=True) if d]
        before = meter.now
        meter.mark()
        values = [*saved, *(primals[i] for i in pair.backward_primals), tangent, *rest]
        del saved

        def adopt(name, gradient):
            fresh = pair.adoptable[name]
            grads[name] = gradient if fresh else torch.empty(gradient.shape, dtype=gradient.dtype).copy_(gradient)

        input_grads = pair.backward(values, states, adopt)
        peaks["first"] = meter.mark() - before
    return outputs, input_grads, grads, peaks


@pytest.mark.sweep(9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda r: r.name)
@pytest.mark.parametrize("name", NAMES)
def test_a_pair_equals_eager_bitwise_and_needs_the_predicted_bytes(name, recipe, dtype):
    layer, args, kwargs = call_of(name, dtype, dropout=0.15)
    expected, tangent, expected_inputs, expected_params = eager(layer, args, kwargs)
    pair = Pair(trace_block(layer, args, kwargs), recipe)
    meter = Meter()
    outputs, input_grads, grads, peaks = run_pair(pair, layer, args, kwargs, tangent, meter)
    assert torch.equal(outputs[0], expected)
    (input_grad,) = (g for g in input_grads if g is not None)
    assert torch.equal(input_grad, expected_inputs[0])
    assert grads.keys() == expected_params.keys()
    assert all(torch.equal(grads[n], expected_params[n]) for n in grads)
    assert peaks == {"forward": pair.forward_peak, "first": pair.backward_peak[True]}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda r: r.name)
def test_a_later_slice_needs_the_predicted_bytes(recipe):
    layer, args, kwargs = call_of("llama")
    _, tangent, _, expected = eager(layer, args, kwargs)
    pair = Pair(trace_block(layer, args, kwargs), recipe)
    meter = Meter()
    primals = [*(p.detach() for p in layer.parameters()), *(t.detach() for t in leaves_of(args, kwargs))]
    sums = {n: torch.zeros_like(p).detach() for n, p in layer.named_parameters()}
    torch.manual_seed(7)
    with meter.watch(), torch.no_grad():
        results, states = pair.forward(list(primals))
        values = [*results[1:], *(primals[i] for i in pair.backward_primals), tangent]
        del results
        with meter.host():
            for t in [*sums.values(), tangent]:
                meter.add(t)
        before = meter.now
        meter.mark()
        pair.backward(values, states, lambda name, gradient: sums[name].add_(gradient))
        # What forward's result left above the saved tensors (the output) died before the mark.
        assert meter.mark() - before == pair.backward_peak[False]
    assert all(torch.equal(sums[n], expected[n]) for n in sums)


def test_keep_runs_no_operation_of_the_forward_twice():
    layer, args, kwargs = call_of("gpt2")
    joint = trace_block(layer, args, kwargs)
    pair = Pair(joint, RECIPES["keep"])
    assert "set_rng" not in pair.backward_source
    assert "native_layer_norm(" not in pair.backward_source
    assert "set_rng" in Pair(joint, RECIPES["recompute"]).backward_source


def test_attention_without_dropout_draws_nothing_that_backward_would_draw_again():
    layer, args, kwargs = call_of("llama", dropout=0.0)
    pair = Pair(trace_block(layer, args, kwargs), RECIPES["recompute"])
    assert "scaled_dot_product" in " ".join(str(node.target) for node in pair.backward_nodes)
    assert "rng" not in pair.forward_source + pair.backward_source


def test_recompute_saves_nothing_and_offload_saves_less_than_keep():
    layer, args, kwargs = call_of("llama")
    joint = trace_block(layer, args, kwargs)
    keep, recompute, offload = (Pair(joint, RECIPES[n]).saved_bytes for n in ("keep", "recompute", "offload"))
    assert recompute == 0 < offload < keep


def test_replayed_random_numbers_leave_the_surrounding_generator_alone():
    layer, args, kwargs = call_of("gpt2")
    _, tangent, _, _ = eager(layer, args, kwargs)
    pair = Pair(trace_block(layer, args, kwargs), RECIPES["recompute"])
    primals = [*(p.detach() for p in layer.parameters()), *(t.detach() for t in leaves_of(args, kwargs))]
    with torch.no_grad():
        _, states = pair.forward(list(primals))
        before = torch.get_rng_state()
        pair.backward([*(primals[i] for i in pair.backward_primals), tangent], states, lambda name, gradient: None)
    assert torch.equal(before, torch.get_rng_state())


def test_tracing_needs_no_weight_memory():
    layer, args, kwargs = call_of("llama")
    real = Pair(trace_block(layer, args, kwargs), RECIPES["offload"])
    for p in layer.parameters():
        p.data = torch.zeros((), dtype=p.dtype).expand(p.shape)
    expanded = Pair(trace_block(layer, args, kwargs), RECIPES["offload"])
    layer.to("meta")
    meta = Pair(trace_block(layer, args, kwargs), RECIPES["offload"])
    assert real.backward_source == expanded.backward_source == meta.backward_source
    assert real.forward_peak == expanded.forward_peak == meta.forward_peak


def test_a_block_whose_code_depends_on_data_is_named_with_the_cause():
    class Moody(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x * 2

    with pytest.raises(UserError) as caught:
        trace_block(Moody(4, 4), (torch.ones(2, 4, requires_grad=True),), {}, name="model.layers.7")
    assert caught.value.code == "block-not-traceable"
    assert "model.layers.7" in caught.value.what and "data" in caught.value.what.lower()


def test_a_block_that_changes_a_buffer_is_refused():
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    with pytest.raises(UserError) as caught:
        trace_block(block, (torch.ones(2, 4, requires_grad=True),), {}, name="norm")
    assert caught.value.code == "block-not-traceable"


def test_a_buffer_that_modules_of_a_block_share_is_given_once():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.scale

    block, scale = nn.Sequential(Scaled(4, 4), Scaled(4, 4)), torch.tensor([1.0, 2.0, 3.0, 4.0])
    for part in block:
        part.register_buffer("scale", scale)
    x = torch.randn(2, 4, requires_grad=True)
    pair = Pair(trace_block(block, (x,), {}), RECIPES["keep"])
    made, *_ = pair.forward([*(p.detach() for p in block.parameters()), scale, x.detach()])[0]
    assert pair.n_buffers == 1 and torch.equal(made, block(x))


def test_an_argument_that_a_block_returns_is_handed_back_as_it_is():
    class Passing(nn.Linear):
        def forward(self, x, bias):
            return super().forward(x) + bias, bias, None

    block, x, bias = Passing(4, 4), torch.randn(2, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    joint = trace_block(block, (x, bias), {})
    (made,), _ = Pair(joint, RECIPES["keep"]).forward([*(p.detach() for p in block.parameters()), x.detach(), bias])
    value = joint.result.deliver([made], [x, bias], [])
    assert torch.equal(value[0], block(x, bias)[0])
    assert value[1] is bias and value[2] is None


@pytest.mark.parametrize(
    ("lay", "sent"),
    [
        (lambda x: x, True),
        (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), True),
        (lambda x: torch.cat([x, x], -1)[..., 2:6], False),
        (lambda x: x[:1].expand(2, 3, 4), False),
    ],
    ids=["in order", "turned", "with gaps", "expanded"],
)
def test_an_input_with_gaps_is_not_sent_since_it_would_come_back_at_another_alignment(lay, sent):
    x = lay(torch.randn(2, 3, 4)).requires_grad_()
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    pairs = make_pairs(trace_block(block, (x,), {}), [RECIPES["recompute"], RECIPES["offload-input"]])
    assert ("offload-input" in pairs) == sent and "recompute" in pairs
