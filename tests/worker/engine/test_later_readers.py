"""What a block is given, or makes, and the model's code reads after it, too: residuals around layers, skips."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn

from planner.measure.analysis import analyse_model
from planner.schedule.allocations import allocations
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from tests.support.engine_plans import adamw, chain_of, resident_plan, streaming_plan
from tests.support.engines import CPU, data
from tests.support.families import assert_bitwise, masked_batch, trained
from tests.support.tiny_models import make_model
from tests.support.unet import pictures, tiny_unet
from worker.engine.engine import Engine

torch.set_num_threads(1)


class Made(threading.local):
    """What a forward has made: each slice runs in a thread of its own."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []


def residual(model: nn.Module) -> None:
    """Around each layer, and a factor, so that what layers are given is the frame's."""
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, out: 0.7 * (out + args[0]))


def skip(model: nn.Module) -> None:
    """From the embedding's result, which the first layer is given, to the end."""
    made = Made()
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: made.tensors.append(out))
    model.model.norm.register_forward_pre_hook(lambda module, args: (args[0] + made.tensors.pop(),))


def dense(model: nn.Module) -> None:
    """Each layer is given the mean of all that was made before, and what the embedding made twice in it."""
    made = Made()

    def mean() -> torch.Tensor:
        return torch.stack([made.tensors[0], *made.tensors]).mean(0)

    model.model.embed_tokens.register_forward_hook(lambda module, args, out: made.tensors.append(out))
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: (mean(), *args[1:]))
        layer.register_forward_hook(lambda module, args, out: made.tensors.append(out + args[0]))
    model.model.norm.register_forward_pre_hook(lambda module, args: made.tensors.clear())


def penalty(model: nn.Module) -> None:
    """The loss reads what the second layer is given, and what the first one has made of it."""
    made, own = Made(), model.loss_function
    model.model.layers[0].register_forward_hook(lambda module, args, out: made.tensors.append(out.pow(2).mean()))
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    model.model.layers[1].register_forward_hook(lambda module, args, out: made.tensors.append(args[0].pow(2).mean()))

    def loss(*args, **kwargs) -> torch.Tensor:
        return own(*args, **kwargs) + 0.01 * (made.tensors.pop() + made.tensors.pop())

    model.loss_function = loss


def changed(change) -> nn.Module:
    model = make_model("llama", torch.bfloat16, layers=2)
    change(model)
    return model


@pytest.mark.parametrize("change", [residual, skip, dense, penalty])
def test_a_model_whose_code_reads_it_again_equals_plain_pytorch_bitwise(change) -> None:
    make = functools.partial(changed, change)
    assert_bitwise(trained(make, masked_batch, slices=2, steps=1, plan_of=streaming_plan))


def test_no_gradient_of_it_adds_up_in_another_order() -> None:
    assert analyse_model(changed(penalty), masked_batch(), device=CPU).inexact == ()


def test_a_unet_whose_options_take_turns_equals_plain_pytorch_bitwise() -> None:
    make, batches = functools.partial(tiny_unet, torch.bfloat16), functools.partial(pictures, dtype=torch.bfloat16)
    assert_bitwise(trained(make, batches, slices=2, steps=1, plan_of=streaming_plan, sums=False))


def test_its_steps_take_what_was_predicted_wherever_that_lies() -> None:
    model, option = changed(residual), "recompute"
    chain = chain_of(model, arranged=True)
    plan = resident_plan(chain, slices=2, option=option)
    predicted = gpu_peak_bytes(compile_program(plan, chain), chain)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU, metered=True)
    batches, rest = data(0, 2)
    assert 0.95 * predicted <= engine.step(batches, learning_rate=1e-3, **rest).peak_bytes <= predicted
    engine.close()
    found = allocations(compile_program(plan, chain), chain)
    most = now = sum(e.bytes for standing in found.standing.values() for e in standing) + found.others_bytes
    sizes = {e.number: e.bytes for standing in found.standing.values() for e in standing}
    for _, events in found.steps:
        for event in events:
            sizes.setdefault(event.number, event.bytes)
            now += event.bytes or -sizes[event.number]
            most = max(most, now)
    assert most <= predicted
