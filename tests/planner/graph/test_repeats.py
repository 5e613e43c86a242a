"""Equal layers run once while a model's forward is recorded; the record is the one of a model whose layers all run."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.errors import UserError
from planner.graph import find_blocks
from planner.graph.repeats import Repeats
from tests.support.families import FAMILIES, family_model, masked_batch, t5
from tests.support.tiny_models import VOCABULARY, batch_of
from tests.support.unet import pictures, tiny_unet

torch.set_num_threads(1)

LAYERS, WIDTH = 12, 8
SHARED = types.SimpleNamespace(seen=0)
RAN: list[int] = []


class Layer(nn.Module):
    """A layer whose code ends with `more`, a function of the layer, what it has computed, and its arguments."""

    def __init__(self, number: int, more: Callable[..., Any]) -> None:
        super().__init__()
        self.number, self.more = number, more
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.even, self.shared, self.kept = number % 2 == 0, SHARED, [0]

    def forward(self, x: Tensor, *others: Any) -> Any:
        RAN.append(1)
        return self.more(self, x + self.down(torch.tanh(self.up(x))), x, *others)


class Model(nn.Module):
    """A model of equal layers. `given`: the arguments of layer `number` beside the hidden states."""

    def __init__(self, more: Callable[..., Any], given: Callable[[Model, int, Tensor], tuple[Any, ...]]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(number, more) for number in range(LAYERS))
        self.given, self.masks = given, (torch.ones(16, 1), torch.zeros(16, 1))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, self.table = self.embed(input_ids), {}
        for number, layer in enumerate(self.layers):
            result = layer(x, *self.given(self, number, x))
            x = result[0] if isinstance(result, tuple) else result
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def nothing(model, number, x):
    return ()


def add_in_place(layer, made, x):
    x.add_(made)
    return x


def count_in_buffer(layer, made, x):
    layer.count += 1
    return made


def branch_on_buffer(layer, made, x):
    return made * 2 if layer.count % 3 == 0 else made


def count_in_shared(layer, made, x):
    layer.shared.seen += 1
    return made * layer.shared.seen


def keep(layer, made, x):
    layer.kept[0] += 1
    return made * layer.kept[0]


def draw(layer, made, x):
    return made * 2 if torch.rand(()) < 0.5 else made


def put(layer, made, x, table):
    table[len(table)] = made
    return made


def branch_on_mask(layer, made, x, mask):
    return made * mask if mask.all() else made


CASES = {
    # what the layers' code does, the arguments that they are given, how many of the layers run
    "equal": (lambda layer, made, x: made, nothing, 1),
    "dropout": (lambda layer, made, x: nn.functional.dropout(made, 0.5), nothing, 1),
    "its number is read": (lambda layer, made, x: made * (1 + layer.number), nothing, LAYERS),
    "an attribute has two values": (lambda layer, made, x: made * 2 if layer.even else made, nothing, 2),
    "a part of the result is the argument": (lambda layer, made, x: (made, x), nothing, 1),
    "a part of the result is a view of the argument": (lambda layer, made, x: (made, x[:1]), nothing, LAYERS),
    "a part of the result is a weight": (lambda layer, made, x: (made, layer.up.weight), nothing, LAYERS),
    "two results share memory": (lambda layer, made, x: (made, made[:1]), nothing, 1),
    "the argument is changed": (add_in_place, nothing, LAYERS),
    "a buffer counts": (count_in_buffer, nothing, LAYERS),
    "the code branches on a buffer": (branch_on_buffer, nothing, 2),
    "an object counts": (count_in_shared, nothing, LAYERS),
    "an attribute counts": (keep, nothing, LAYERS),
    "the model has left a tensor for the layer": (
        lambda layer, made, x: made + layer.shared.left,
        lambda model, number, x: setattr(SHARED, "left", 2 * x) or (),
        LAYERS,
    ),
    "an object has another value for each": (
        lambda layer, made, x: made * layer.shared.scale,
        lambda model, number, x: setattr(SHARED, "scale", number) or (),
        LAYERS,
    ),
    "numbers are drawn": (draw, nothing, LAYERS),
    "a table takes results": (put, lambda model, number, x: (model.table,), LAYERS),
    "one argument is given twice": (
        lambda layer, made, x, other: made + other,
        lambda model, number, x: (x if number % 2 else x.clone(),),
        2,
    ),
    "an argument is a weight": (
        lambda layer, made, x, weight: made + weight[0, 0],
        lambda model, number, x: (model.layers[number if number % 2 else 0].up.weight,),
        2,
    ),
    "masks have other values": (branch_on_mask, lambda model, number, x: (model.masks[number % 2],), 2),
}


def found(model, batch, monkeypatch, **kwargs):
    """The blocks of `model`, and those that a record finds in which all layers run; either may be an error."""
    results = []
    for repeats in (True, False):
        RAN.clear()
        SHARED.seen = 0
        for layer in model.modules():
            if isinstance(layer, Layer):
                layer.kept[0] = 0
        torch.manual_seed(0)
        with monkeypatch.context() as patch:
            if not repeats:
                patch.setattr(Repeats, "stand_in", lambda self: contextlib.nullcontext())
            try:
                blocks = find_blocks(model, batch)
                results.append((blocks, {kind: code.reason for kind, code in blocks.eager.items()}, len(RAN)))
            except UserError as error:
                results.append((str(error), {}, len(RAN)))
    return results


@pytest.mark.parametrize("case", CASES)
def test_a_layer_runs_unless_it_would_do_what_an_earlier_one_has_done(case, monkeypatch):
    more, given, ran = CASES[case]
    model = Model(more, given)
    for layer in model.layers:
        layer.count += layer.number % 3 > 0 if case == "the code branches on a buffer" else 0
    (blocks, _, count), (expected, _, all_layers) = found(model, batch_of(), monkeypatch)
    assert blocks == expected
    assert (count, all_layers) == (ran, LAYERS)


def test_what_differs_in_a_submodule_or_its_hooks_makes_a_layer_run(monkeypatch):
    model = Model(lambda layer, made, x: made, nothing)
    model.layers[3].up.register_forward_hook(lambda module, args, made: made * 2)
    model.layers[4].up.weight.requires_grad_(False)
    model.layers[5].down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
    model.layers[6].up.eval()
    model.layers[7].down.double().forward = lambda x: nn.functional.linear(
        x.double(), model.layers[7].down.weight
    ).float()
    (blocks, _, count), (expected, _, _) = found(model, batch_of(), monkeypatch)
    assert blocks == expected
    assert count == 6


def test_layers_with_a_part_in_common_run_once(monkeypatch):
    model = Model(lambda layer, made, x: made, nothing)
    for layer in model.layers:
        layer.down = model.layers[0].down
    (blocks, _, count), (expected, _, _) = found(model, batch_of(), monkeypatch)
    assert blocks == expected
    assert count == 2  # the first one's operations make the nodes of autograd for the weights in common


def test_the_result_of_a_repeated_layer_may_be_changed_in_place(monkeypatch):
    model = Model(lambda layer, made, x: made, lambda model, number, x: x.mul_(2) and () if number else ())
    (blocks, _, count), (expected, _, _) = found(model, batch_of(), monkeypatch)
    assert blocks == expected
    assert count == 1


def test_errors_are_those_of_a_record_in_which_all_layers_run(monkeypatch):
    twice = Model(lambda layer, made, x: made, nothing)
    twice.layers.append(twice.layers[0])
    reads = Model(
        lambda layer, made, x, other: made + other, lambda model, number, x: (model.layers[5].up.bias[0] * x,)
    )
    for model in (twice, reads):
        (error, _, count), (expected, _, _) = found(model, batch_of(), monkeypatch)
        assert error == expected
        assert count < LAYERS
    assert "layers.5.up.bias is read outside of its block" in error


@pytest.mark.parametrize("name", ["t5", "unet", *FAMILIES])
def test_a_model_has_the_kinds_of_blocks_that_a_full_record_finds(name, monkeypatch):
    batch = pictures() if name == "unet" else masked_batch()
    model = {"t5": t5, "unet": tiny_unet}.get(name, lambda: family_model(name))()
    (blocks, _, _), (expected, _, _) = found(model, batch, monkeypatch)
    assert blocks == expected
