"""The comparisons with the papers: what is derived from their figures, and small versions of their orders."""

from __future__ import annotations

import pytest

from benchmarks import paper000, paper004
from benchmarks.by_profit import by_profit
from benchmarks.chains import GB, LLAMA2_7B, LLAMA3_70B
from benchmarks.paper004 import Row
from planner.candidate.candidate import assemble
from planner.greedy.streaming import profile
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from planner.search.problem import Problem

SMALL = Row(network="GPT-2", depth=32, rows=64, sum_ms=19755, bound_ms=19755, greedy_ms=0, l2l_ms=0)


def test_the_shapes_have_the_parameters_their_models_have():
    assert LLAMA2_7B.parameters == 6_738_415_616
    assert LLAMA3_70B.parameters == 70_553_706_496


def test_the_reference_step_is_the_one_the_three_overheads_of_paper_000_imply():
    for seconds, overhead in ((13.5, 0.137), (14.4, 0.216), (15.7, 0.323)):
        assert seconds / (1 + overhead) == pytest.approx(paper000.REFERENCE_S, abs=0.04)


def test_updates_and_computing_add_up_to_the_reference_step():
    assert paper000.update_s() == pytest.approx(6.607 * 4 / 16.6, abs=0.001)
    layers = sum(o.forward_s + o.backward_s for b in paper000.chain().blocks for o in b.options[:1])
    assert layers + paper000.update_s() == pytest.approx(paper000.REFERENCE_S)


def test_results_that_travel_take_longer_to_compute_than_to_send_and_fetch():
    speed, tokens = paper000.speed_flops_per_s(), paper000.BATCH.tokens

    def both_ways_s(count: int) -> float:
        return 2 * 4 * count / paper000.LINK

    for inputs, outputs in ((4096, 4096), (4096, 11008)):  # q, k, v, o; gate, up
        assert 2 * tokens * inputs * outputs / speed > both_ways_s(tokens * outputs)
    scores = 4 * 32 * 512 * 512
    assert 2 * scores * 128 / speed < both_ways_s(scores)


def test_a_part_of_llama2_is_slower_without_cpu_updates_and_without_activation_offload():
    times = {}
    for variant in paper000.VARIANTS:
        plan = Problem(
            chain=paper000.chain(layers=5),
            hardware=paper000.hardware(),
            gpu_budget_bytes=int(6.5 * GB),
            cpu_budget_bytes=paper000.HOST,
            slices=1,
            clip=False,
            cpu_updates=variant.cpu_updates,
            activation_offload=variant.activation_offload,
        ).plan(gap=0.05)
        times[variant.name] = plan.step_s
    assert times["full"] < times["no CPU updates"]
    assert times["full"] < times["no activation offload"]


def test_a_layers_transfer_is_the_unit_of_paper_004s_overheads():
    transfer_ms = 1000 * 4 * paper004.layer_parameters(SMALL) / paper004.LINK
    assert transfer_ms == pytest.approx(36.0, abs=0.1)
    for row in paper004.ROWS[:9]:
        assert (row.greedy_ms - row.sum_ms) / transfer_ms % 1 == pytest.approx(0, abs=0.01)


def test_l2l_waits_for_two_transfers_a_layer():
    problem = paper004.setting(SMALL)
    over_s = paper004.step_s(paper004.l2l(problem), problem) - SMALL.sum_ms / 1000
    # The last layer is there already when its backward follows; its gradient's update sends it in the next stage.
    transfer_s = 4 * paper004.layer_parameters(SMALL) / paper004.LINK
    assert over_s / transfer_s == pytest.approx(2 * SMALL.layers, abs=2)


def test_the_greedy_plan_of_paper_004_fits_and_comes_near_the_bound():
    problem = paper004.setting(SMALL)
    candidate = by_profit(problem, profile(problem, "fast"), spare=2)
    assert candidate is not None and any(schedule.weight for schedule in candidate.schedules)
    program = compile_program(assemble(problem.chain, candidate, slices=1, clip=False), problem.chain)
    assert gpu_peak_bytes(program, problem.chain) <= problem.budgets.gpu_bytes
    answer = paper004.answer(SMALL)
    assert answer.bound_s <= answer.greedy_s * (1 + 1e-9) < 1.01 * answer.bound_s < answer.l2l_s
