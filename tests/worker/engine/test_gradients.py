"""Gradients of a weight that embedding and head share: added up in plain PyTorch's order, with few rows aside."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from planner.cpu.meter import Meter
from planner.schedule.chain import Block, Chain, Option, Tensor
from planner.schedule.peak_moments import ROWS_AT_ONCE, tied_rows
from worker.engine.gradients import Gradients
from worker.runtime.arena import NoPlaces
from worker.runtime.cpu import CpuMachine

ROWS, WIDTH = 2 * ROWS_AT_ONCE + 300, 8


def tokens_of(slices: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, ROWS, (count,), generator=generator).unique() for _ in range(slices)]


def gradients_of(tokens: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The head's gradient, and the embedding's, which has rows for the tokens only."""
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    head = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    embedding = torch.zeros(ROWS, WIDTH, dtype=dtype)
    embedding[tokens] = torch.randn(len(tokens), WIDTH, generator=generator).to(dtype)
    return head, embedding


def union(tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat(tokens[: k + 1]).unique() for k in range(len(tokens))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("slices", "count"), [(2, 5), (3, 400), (5, 4000)])
def test_the_sum_is_bitwise_that_of_plain_accumulation(slices, count, dtype):
    tokens, items = tokens_of(slices, count), {}
    sums = Gradients(
        SimpleNamespace(items=items),
        CpuMachine(metered=False),
        NoPlaces(),
        {},
        order=("e",),
        by_rows=("e",),
        max_norm=None,
    )
    sums.begin_round(union(tokens))
    wanted = torch.zeros(ROWS, WIDTH, dtype=dtype)
    for k in range(slices):
        head, embedding = gradients_of(tokens[k], dtype)
        wanted += head + embedding
        sums.add("e", k, head, fresh=True, last_block=True)
    for k in range(slices):
        sums.add("e", k, gradients_of(tokens[k], dtype)[1], fresh=True, last_block=False)
    assert torch.equal(sums.of("e"), wanted)


def test_what_waits_aside_is_what_the_planner_charges():
    slices, count = 4, 300
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[: slices * count]
    tokens, size = list(order.view(slices, count)), ROWS * WIDTH * 4  # no token comes twice
    shared = Tensor(
        name="e", elements=ROWS * WIDTH, bytes=size, gradient_bytes=size, state_bytes=2 * size, row_bytes=WIDTH * 4
    )
    block = Block(name="b", kind="b", tensors=(shared,), options=(Option(name="keep"),))
    rows = tied_rows(Chain(blocks=(block, block), slice_tokens=count), slices, 1, begun=False)["e"]

    machine = CpuMachine(metered=True)
    meter, items = machine.meter, {}
    assert isinstance(meter, Meter)
    sums = Gradients(SimpleNamespace(items=items), machine, NoPlaces(), {}, order=("e",), by_rows=("e",), max_norm=None)
    sums.begin_round([machine.stage(found) for found in union(tokens)])
    aside = 0
    with meter.watch():
        for last_block in (True, False):
            for k in range(slices):
                made = gradients_of(tokens[k], torch.float32)[0 if last_block else 1]
                meter.add(made)
                before = meter.now
                meter.reset_peak()
                sums.add("e", k, made, fresh=True, last_block=last_block)
                beside = rows.masking_bytes(k) if last_block else rows.taking_bytes(k)
                change = rows.aside_bytes(k) if last_block else -rows.aside_bytes(k)
                assert meter.now - before == change
                assert meter.peak - before == beside + max(0, change)
                aside += change
                del made
    assert aside == 0 and meter.now == size
