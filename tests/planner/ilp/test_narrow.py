"""Options for the integer program: those that its relaxation uses are enough."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.candidate.setting import Budgets, Setting
from planner.ilp.instance import make_instance
from planner.ilp.narrow import narrowed, relaxed_s
from planner.ilp.program import solve_oilp
from planner.schedule.chain import Block, Chain, Option
from tests.support.chains import HARDWARE, chain


def with_many_options(small: Chain, chance: random.Random) -> Chain:
    """Each block between the ends has twelve options: the more bytes stay or travel, the less is computed again."""

    def of(block: Block) -> Block:
        first, options = block.options[0], list[Option]()
        for number in range(12):
            saved, travels = chance.randrange(1000), chance.random() < 0.4
            options.append(
                replace(
                    first,
                    name=f"o{number}",
                    saved_bytes=0 if travels else saved,
                    offloaded_bytes=saved if travels else 0,
                    backward_s=first.backward_s * (2 - saved / 1000),
                    reads_input=not travels,
                )
            )
        return replace(block, options=tuple(options))

    last = len(small.blocks) - 1
    return replace(small, blocks=tuple(of(b) if 0 < i < last else b for i, b in enumerate(small.blocks)))


@pytest.mark.parametrize("seed", range(6))
def test_the_relaxation_is_as_good_with_the_options_it_uses(seed: int) -> None:
    many = with_many_options(chain(4), random.Random(seed))
    budgets = Budgets(gpu_bytes=5000 + 400 * seed, cpu_bytes=2**30)
    setting = Setting(chain=many, hardware=HARDWARE, budgets=budgets, slices=2, clip=False)
    fewest = tuple(min(b.options, key=lambda o: (o.saved_bytes, o.offloaded_bytes)).name for b in many.blocks)
    fewer, least_s = narrowed(setting, fewest)
    counts = [len(block.options) for block in fewer.chain.blocks]
    assert max(counts) < 12
    assert all(name in {o.name for o in b.options} for name, b in zip(fewest, fewer.chain.blocks, strict=True))
    assert relaxed_s(fewer) == pytest.approx(relaxed_s(setting), rel=1e-6)
    solution = solve_oilp(make_instance(setting), gap=0.0)
    assert solution is not None
    assert 0 < least_s == relaxed_s(setting) <= solution.step_s * (1 + 1e-6)


def test_few_options_stay_and_so_do_all_where_nothing_fits() -> None:
    large, none = (Budgets(gpu_bytes=size, cpu_bytes=size) for size in (2**30, 1))
    few = Setting(chain=chain(3), hardware=HARDWARE, budgets=large, slices=1, clip=False)
    always = tuple(block.options[0].name for block in few.chain.blocks)
    assert narrowed(few, always)[0] is few
    tight = replace(few, chain=with_many_options(few.chain, random.Random(0)), budgets=none)
    assert narrowed(tight, tuple(block.options[0].name for block in tight.chain.blocks))[0] is tight
    assert solve_oilp(make_instance(tight), gap=0.01) is None
