"""The whole way in one process: a model's analysis, the planner's plan, the engine's steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from planner.cpu.meter import Meter
from planner.errors import Exit, UserError
from planner.machine.hardware import Hardware
from planner.measure.analysis import analyse_model, estimate_times
from planner.measure.machine_rates import estimate_hardware
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.search.problem import Problem
from planner.units import parse_bytes
from tests.support.engine_plans import adamw
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine

CPU = torch.device("cpu")
VOCABULARY = 128
SHARES = (1.0, 0.6, 0.4)
CASES = [("llama", 1), ("llama", 4), ("gpt2", 1), ("gpt2", 4)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(name: str) -> nn.Module:
    return make_model(name, vocabulary=VOCABULARY)


def batches_of(step: int, slices: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(0, VOCABULARY, (slices, 2, 24), generator=generator)
    return [{"input_ids": ids, "labels": ids.clone()} for ids in drawn]


def hardware() -> Hardware:
    """This machine; every tensor may move, and links so slow against computation that not everything should."""
    return replace(
        estimate_hardware(CPU), min_transfer_bytes=0, flops_per_s=2e9, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9
    )


@functools.cache
def chain_of(name: str) -> Chain:
    analysis = analyse_model(model_of(name), batches_of(0, 1)[0], device=CPU)
    return analysis.chain(estimate_times(analysis, hardware()))


@functools.cache
def plain_peak_bytes(name: str, slices: int) -> int:
    """What plain PyTorch needs for the same steps, by the same meter."""
    meter, model = Meter(), model_of(name)
    for tensor in (*model.parameters(), *model.buffers()):
        meter.add(tensor)
    engine = PlainEngine(model, optimizer=adamw(model), max_grad_norm=None)
    with meter.watch():
        for step in range(2):
            engine.step(batches_of(step, slices), seeds=range(slices), learning_rate=1e-3)
    return meter.peak


def plan_of(chain: Chain, budget_bytes: int, slices: int, clip: bool = False) -> Plan:
    return Problem(
        chain=chain,
        hardware=hardware(),
        gpu_budget_bytes=budget_bytes,
        cpu_budget_bytes=2**30,
        slices=slices,
        clip=clip,
    ).plan()


def run(engine: Engine | PlainEngine, steps: int, slices: int) -> tuple[list[Tensor], int]:
    """Losses of all steps and slices, and the highest peak."""
    losses, peak = [], 0
    for step in range(steps):
        seeds = [100 * step + k for k in range(slices)]
        items = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches_of(step, slices))
        result = engine.step(batches_of(step, slices), seeds=seeds, learning_rate=1e-3, num_items_in_batch=items)
        losses += result.losses
        peak = max(peak, result.peak_bytes or 0)
    return losses, peak


@pytest.mark.sweep(12)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("name", "slices"), CASES)
def test_the_peak_is_within_the_prediction_and_the_prediction_within_the_budget(name, slices, share):
    chain = chain_of(name)
    budget = int(share * plain_peak_bytes(name, slices))
    plan = plan_of(chain, budget, slices)
    model = model_of(name)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU, metered=True)
    _, measured = run(engine, 3, slices)
    engine.drain()
    engine.close()
    assert measured <= plan.gpu_peak_bytes <= budget
    assert plan.gpu_peak_bytes <= 1.05 * measured


@pytest.mark.sweep(9)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("name", "slices"), CASES)
def test_a_planned_run_at_40_percent_equals_plain_pytorch_bitwise(name, slices, clip):
    chain = chain_of(name)
    plan = plan_of(chain, int(0.4 * plain_peak_bytes(name, slices)), slices, clip)
    norm = 0.5 if clip else None
    model, plain_model = model_of(name), model_of(name)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=norm, device=CPU)
    plain = PlainEngine(plain_model, optimizer=adamw(plain_model), max_grad_norm=norm)
    losses, _ = run(engine, 10, slices)
    wanted, _ = run(plain, 10, slices)
    assert all(torch.equal(a, b) for a, b in zip(losses, wanted, strict=True))
    weights = dict(engine.restore().named_parameters())
    for key, parameter in plain_model.named_parameters():
        assert torch.equal(weights[key], parameter), key


def test_below_the_least_possible_budget_it_is_named_and_works():
    chain = chain_of("llama")
    with pytest.raises(UserError) as caught:
        plan_of(chain, 1000, 1)
    assert caught.value.exit_code is Exit.DOES_NOT_FIT
    assert "least possible" in str(caught.value)
    named = parse_bytes(caught.value.hint.rpartition(" ")[2])
    assert plan_of(chain, named, 1).gpu_peak_bytes <= named
