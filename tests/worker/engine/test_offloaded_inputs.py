"""The inputs that blocks keep may leave the device too: what fits then, with the numbers of plain PyTorch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks import interface
from planner.schedule.chain import Chain
from planner.search.problem import Problem
from tests.support.chains import HARDWARE
from tests.support.engine_plans import adamw, chain_of, resident_plan
from tests.support.engines import CPU, assert_same, assert_same_state, build, data, run
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)

HOST = 10**9
SENT = ("offload-input", "offload-all")


def frozen(layers: int) -> torch.nn.Module:
    """All but the norms is frozen: there is little but activations to hold."""
    model = make_model("llama", layers=layers)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


def without_sent(chain: Chain) -> Chain:
    blocks = (replace(b, options=tuple(o for o in b.options if not o.name.startswith(SENT))) for b in chain.blocks)
    return replace(chain, blocks=tuple(blocks))


@pytest.mark.parametrize("option", SENT)
def test_what_is_sent_of_a_block_leaves_nothing_on_the_device(option: str) -> None:
    engine, plain = build("llama", resident_plan, slices=2, option=option, metered=True, dtype=torch.bfloat16)
    seen = []

    def at_the_head(*args, **kwargs):
        layers = [call for (index, _), call in engine._rounds.calls.items() if 0 < index < head.index]
        sizes = [t.numel() for call in layers for t in call._primals.values()]
        seen.append((len(layers), sizes, [item for item in engine._device.items if item.startswith("a:1.")]))
        return engine._enter(head, *args, **kwargs)

    head = engine._blocks[-1]
    head.replace_forward(at_the_head)
    try:
        assert_same(run(engine, range(2), 2), run(plain, range(2), 2))
        assert_same_state(engine, plain)
    finally:
        engine.close()
    calls, sizes, first_layers = seen[1]  # when the second slice is there
    assert calls == 6
    assert all(size < 2 * 16 * 32 for size in sizes)  # rotary tables, no input
    assert not first_layers


def test_a_budget_that_inputs_alone_would_fill_is_enough() -> None:
    model, plain = frozen(layers=12), frozen(layers=12)
    chain = chain_of(model)
    problem = {"cpu_budget_bytes": HOST, "slices": 1, "clip": False}
    budget = Problem(chain=chain, hardware=HARDWARE, gpu_budget_bytes=0, **problem).least().gpu_bytes
    inputs = sum(block.input_bytes for block in chain.blocks[1:-1])
    assert (
        budget
        < Problem(
            chain=without_sent(chain),
            hardware=HARDWARE,
            gpu_budget_bytes=0,
            **problem,
        )
        .least()
        .gpu_bytes
        - inputs // 2
    )
    plan = Problem(chain=chain, hardware=HARDWARE, gpu_budget_bytes=budget, **problem).plan()
    assert any(option.startswith(SENT) for option in plan.options)
    settings = {"optimizer": adamw(model), "max_grad_norm": None}
    engine = Engine(model, plan=plan, chain=chain, device=CPU, metered=True, **settings)
    reference = PlainEngine(plain, **settings)
    try:
        assert_same(run(engine, range(2), 1), run(reference, range(2), 1))
        assert_same_state(engine, reference)
        batches, rest = data(2, 1)
        result = engine.step(batches, learning_rate=1e-3, **rest)
        assert 0 < result.peak_bytes <= plan.gpu_peak_bytes <= budget
    finally:
        engine.close()


def test_without_activation_offload_inputs_stay() -> None:
    chain = chain_of(make_model("llama"))
    plan = Problem(
        chain=chain,
        hardware=HARDWARE,
        gpu_budget_bytes=HOST,
        cpu_budget_bytes=HOST,
        slices=1,
        clip=False,
        activation_offload=False,
    ).plan()
    assert not set(SENT) & set(plan.options)


def test_where_no_gradient_leads_to_the_block_before_there_is_no_input_to_send() -> None:
    model = make_model("llama")
    for parameter in (*model.model.embed_tokens.parameters(), *model.model.layers[0].parameters()):
        parameter.requires_grad_(False)
    names = [{option.name for option in block.options} for block in chain_of(model).blocks[1:4]]
    assert [set(SENT) & found for found in names] == [set(), set(), set(SENT)]


def test_16k_tokens_of_an_8b_model_under_lora_fit_8_gib_with_the_inputs_on_the_host() -> None:
    case = next(case for case in interface.cases() if (case.group, case.length) == ("long-lora", 16384))
    before, now = (interface.solve(case, variant, plans=False) for variant in ("before", "built"))
    assert case.gpu_gib == 8
    assert now.least_gpu_bytes < 0.6 * before.least_gpu_bytes
    assert now.least_gpu_bytes < case.hardware().gpu_bytes < before.least_gpu_bytes
    assert now.bound_s <= now.step_s < 1.01 * now.bound_s
    assert math.isinf(before.step_s)
