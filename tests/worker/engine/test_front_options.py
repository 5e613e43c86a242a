"""Options of fronts in the engine: layers that save any set keep plain PyTorch's bits, within the bytes predicted.
Some tests take seconds: a model is traced for its plan, and again for its engine."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from planner.schedule.plan import Plan
from tests.support.engine_plans import adamw, chain_of, resident_plan
from tests.support.families import assert_bitwise, family_model, masked_batch, trained
from worker.engine.engine import Engine

torch.set_num_threads(1)


def front_options(chain: Chain) -> list[str]:
    """Of a layer, those that save a set of the front."""
    return [option.name for option in chain.blocks[1].options if " " in option.recipe]


def with_options(plan: Plan, names: list[str], first: int) -> Plan:
    """Each layer has another of the options, from number `first` on."""
    layers = [names[(first + layer) % len(names)] for layer in range(len(plan.options) - 2)]
    return replace(plan, options=(plan.options[0], *layers, plan.options[-1]))


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_layers_with_any_option_of_their_front_equal_plain_pytorch_bitwise(family: str) -> None:
    names = front_options(chain_of(family_model(family), masked_batch()))
    assert len(names) >= 8

    for first in range(0, len(names), 4):

        def plan_of(chain: Chain, *, slices: int, clip: bool, first: int = first) -> Plan:
            plan = with_options(resident_plan(chain, slices=slices, clip=clip), names, first)
            return replace(plan, gpu_peak_bytes=gpu_peak_bytes(compile_program(plan, chain), chain))

        make = functools.partial(family_model, family)
        assert_bitwise(trained(make, masked_batch, slices=2, steps=1, clip=0.5, plan_of=plan_of))


def test_what_they_take_is_at_most_what_was_predicted_and_little_less() -> None:
    """What turns need at most is added up, though not all of it is there at one moment: so 5%, and not 1."""
    for first in (0, 7):
        model = family_model("llama")
        chain = chain_of(model, masked_batch())
        plan = with_options(resident_plan(chain, slices=2, clip=False), front_options(chain), first)
        predicted = gpu_peak_bytes(compile_program(plan, chain), chain)
        plan = replace(plan, gpu_peak_bytes=predicted)
        settings = {"optimizer": adamw(model), "max_grad_norm": None}
        engine = Engine(model, plan=plan, chain=chain, device=torch.device("cpu"), metered=True, **settings)
        batches = [masked_batch(k) for k in range(2)]
        found = engine.step(batches, seeds=[0, 1], learning_rate=1e-3, num_items_in_batch=40)
        assert 0.95 * predicted <= found.peak_bytes <= predicted
        engine.close()


def test_of_each_option_that_travels_the_host_gets_what_is_planned() -> None:
    """Where the input alone travels, a set that is saved stays on the device."""
    names = [option.name for option in chain_of(family_model("llama"), masked_batch()).blocks[1].options]
    names = [name for name in names if name.startswith("offload")]
    assert {"offload-input-1", "offload-input-2"} <= set(names)
    for first in range(0, len(names), 3):
        model = family_model("llama")
        chain = chain_of(model, masked_batch())
        plan = with_options(resident_plan(chain, slices=2, clip=False), names, first)
        settings = {"optimizer": adamw(model), "max_grad_norm": None}
        engine = Engine(model, plan=plan, chain=chain, device=torch.device("cpu"), **settings)
        engine.step([masked_batch(k) for k in range(2)], seeds=[0, 1], learning_rate=1e-3, num_items_in_batch=40)
        engine.drain()
        for index, (block, option) in enumerate(zip(chain.blocks, plan.options, strict=True)):
            for k in range(2) if (planned := block.option(option).offloaded_bytes) else ():
                sent = sum(t.nbytes for t in engine._weights.host.items[f"a:{index}.{k}"])
                assert sent == planned, (option, sent, planned)
        engine.close()
