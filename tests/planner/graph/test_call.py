from __future__ import annotations

import functools

import pytest
import torch

from planner.graph import RECIPES, BlockCall, Pair, find_blocks, flatten_call, run_slice, trace_block
from planner.graph.pieces import Pieces
from tests.support.tiny_models import NAMES, batch_of, make_model

torch.set_num_threads(1)


class Call(BlockCall):
    """A block whose weights are its module's parameters and whose gradients add up in a table."""

    def __init__(self, pair, module, tensors, given, sums):
        super().__init__(pair, tensors, given)
        self.module, self.sums = module, sums

    def forward(self, tensors):
        values = [*(p.detach() for p in self.module.parameters()), *self.module.buffers(), *tensors]
        self.primals = [values[i] for i in self.pair.backward_primals]
        results, self.states = self.pair.forward(values)
        self.saved = results[self.pair.n_outputs :]
        return results[: self.pair.n_outputs]

    def backward(self):
        params = dict(self.module.named_parameters())

        def add(name, gradient):
            key = id(params[name])
            self.sums[key] = self.sums[key] + gradient if key in self.sums else gradient.clone()

        return self.pair.backward([*self.saved, *self.primals, *self.take_tangents()], self.states, add)


def run_cut(model, batch, recipe):
    """Loss and gradients of one slice, every layer under `recipe`, the graph cut around every block."""
    names = find_blocks(model, batch)
    calls, sums, anchor, given = [], {}, torch.zeros((), requires_grad=True), Pieces()
    pairs = {}  # layers of a kind have the same code

    def enter(index, module, forward, *args, **kwargs):
        tensors = flatten_call(args, kwargs)[1]
        module.forward = forward
        kind, is_layer = names.kinds[index], 0 < index < len(names.all) - 1
        if kind not in pairs:
            pairs[kind] = Pair(trace_block(module, args, kwargs), RECIPES[recipe if is_layer else "keep"])
        calls.append(Call(pairs[kind], module, tensors, given, sums))
        return calls[-1].enter(tensors, [], anchor)

    for index, name in enumerate(names.all):
        module = model.get_submodule(name)
        module.forward = functools.partial(enter, index, module, module.forward)
    loss = run_slice(model, batch, {}, torch.device("cpu"), given)
    with torch.no_grad():
        while calls:
            call = calls.pop()
            call.pass_on(call.backward(), calls[-1] if calls else None)
            call.clear()
    grads = {n: sums.get(id(p), p.grad) for n, p in model.named_parameters()}
    return loss, grads


@pytest.mark.sweep(8)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_cut_around_its_blocks_has_plain_losses_and_gradients_bitwise(name, recipe):
    batch = batch_of(padded=True)
    plain, cut = make_model(name), make_model(name)
    torch.manual_seed(5)
    expected = plain(**batch).loss
    expected.backward()
    torch.manual_seed(5)
    loss, grads = run_cut(cut, batch, recipe)
    assert torch.equal(loss, expected)
    assert all(torch.equal(grads[n], p.grad) for n, p in plain.named_parameters())


def test_a_missing_gradient_of_an_output_is_zero():
    model = make_model("bloom")  # its layers return attention weights too, which nobody differentiates
    loss, grads = run_cut(model, batch_of(), "keep")
    assert loss.isfinite() and all(g is not None for g in grads.values())


def test_run_slice_copies_the_batch_and_forgets_it():
    model = make_model("llama")
    seen = []
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda module, args: seen.append(args[0].data_ptr()))
    batch = batch_of()
    run_slice(model, batch, {}, torch.device("cpu"), Pieces())
    hook.remove()
    assert seen and batch["input_ids"].data_ptr() not in seen
