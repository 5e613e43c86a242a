"""Receipts: every byte has a name, the busiest resource limits, changes are planned anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offmated.cli.quality import proof, quality
from planner.candidate.evaluate import predicted_step_s
from planner.machine.hardware import Hardware
from planner.reports.make_receipt import (
    LAUNCHING,
    disk_shares,
    gpu_shares,
    host_shares,
    loads,
    receipt,
    reference_s,
    solved,
    status_of,
)
from planner.reports.receipt import Asked
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import cpu_parts, cpu_peak_bytes, gpu_peak_bytes
from planner.schedule.plan import Plan
from planner.search.problem import Problem
from planner.units import format_bytes_down, format_part
from planner.whatif.what_helps import Variations, best_of, unplanned, variations
from tests.support.chains import HARDWARE, chain, mixed_plan, resident_plan

NO_CLIPPING = "no clipping (--clip none, max_grad_norm: 0)"
ASKED = Asked(model="m", dtype="fp32", length=10, rows=1, slices=2, clip=False)


def named(shares: tuple[object, ...]) -> dict[str, int]:
    return {share.name: share.bytes for share in shares}  # type: ignore[attr-defined]


def made(problem: Problem) -> Plan:
    return problem.plan()


def problem_of(a_chain: Chain, hardware: Hardware = HARDWARE, *, gpu: int = 8000, slices: int = 1) -> Problem:
    return Problem(
        chain=a_chain, hardware=hardware, gpu_budget_bytes=gpu, cpu_budget_bytes=10**7, slices=slices, clip=False
    )


@pytest.mark.parametrize("slices", [1, 3])
def test_the_shares_of_a_memory_add_up_to_its_peak(slices: int) -> None:
    a_chain, a_plan = chain(2), mixed_plan(slices)
    program = compile_program(a_plan, a_chain)
    assert sum(named(gpu_shares(program, a_chain)).values()) == gpu_peak_bytes(program, a_chain)
    assert sum(named(host_shares(a_plan, a_chain)).values()) == cpu_peak_bytes(a_plan, a_chain)


def test_weights_that_stay_are_told_from_those_in_flight() -> None:
    a_chain = chain(2)
    staying = named(gpu_shares(compile_program(resident_plan(a_chain), a_chain), a_chain))
    assert staying["weights that stay"] == sum(t.bytes for t in a_chain.tensors())
    assert "weights in flight" not in staying
    mixed = named(gpu_shares(compile_program(mixed_plan(), a_chain), a_chain))
    assert mixed["weights that stay"] == 3 * 400  # e, h and l0.a


def test_the_host_keeps_what_moves_and_what_its_updates_need() -> None:
    parts = cpu_parts(mixed_plan(2), chain(2))
    # l0.b and l1.a are updated there, l1.b travels with its states; block 2 offloads 500 bytes a slice
    assert parts.weights_bytes == 4 * (200 + 100 + 200)
    assert parts.states_bytes == 8 * (200 + 100 + 200)
    assert parts.gradients_bytes == 4 * (200 + 100)
    assert parts.offloaded_bytes == 2 * 500


def test_a_checkpoint_has_masters_and_moments_of_what_is_trained() -> None:
    trained = sum(t.elements for t in chain(2).tensors()) + 1
    disk = named(disk_shares(chain(2), ASKED))
    assert disk["checkpoints kept: 2"] == 2 * 12 * trained
    assert disk["a checkpoint being written"] == 12 * trained
    assert disk["the trained model, twice"] == 2 * 4 * trained
    assert "each checkpoint, all are kept" in named(disk_shares(chain(2), replace(ASKED, keep=None)))


def test_loads_are_work_over_rates_the_busiest_first() -> None:
    a_chain, a_plan = chain(2), mixed_plan()
    program = compile_program(a_plan, a_chain)
    step_s = predicted_step_s(program, a_chain, HARDWARE)
    found = loads(program, a_chain, HARDWARE, step_s)
    busy = {load.resource: load.busy_s for load in found}
    assert [load.busy_s for load in found] == sorted(busy.values(), reverse=True)
    assert busy["CPU updates"] == pytest.approx(300 / 500)
    # embedding, keep and offload of a layer, recompute of the other, head
    assert busy["GPU computing"] == pytest.approx(0.2 + 4 + 3.2 + 1.0)
    assert all(load.share == pytest.approx(load.busy_s / step_s) for load in found)
    assert max(load.share for load in found) <= 1.0


def test_launching_limits_where_turns_take_as_long_as_their_launches() -> None:
    a_chain, slow = chain(2), replace(HARDWARE, launch_s=5.0)
    program = compile_program(mixed_plan(), a_chain)
    found = loads(program, a_chain, slow, predicted_step_s(program, a_chain, slow))
    assert (found[0].resource, found[0].busy_s) == (LAUNCHING, 7 * 5.0)
    assert {load.resource: load.busy_s for load in found}["GPU computing"] == pytest.approx(0.2 + 4 + 3.2 + 1.0)


def test_a_budget_never_looks_larger_than_it_is() -> None:
    gib = 2**30
    assert format_bytes_down(int(11.96 * gib)) == "11.9 GiB"
    assert format_part(int(6.01 * gib), int(11.96 * gib)) == "6.1 GiB of 11.9 GiB"
    assert format_part(int(11.95 * gib), int(11.96 * gib)) == "all of 11.9 GiB"
    assert format_part(12 * gib, int(11.96 * gib)) == "12.0 GiB of 11.9 GiB", "more than there is"
    assert format_part(8 * gib, 8 * gib) == "8.0 GiB of 8.0 GiB"


def test_a_receipt_has_the_plans_figures_and_tokens_per_second() -> None:
    a_chain = replace(chain(2), slice_tokens=10)
    plan = made(problem_of(a_chain, slices=2))
    found = receipt(plan, a_chain, HARDWARE, ASKED, gap=0.01)
    assert (found.step_s, found.gpu_peak_bytes, found.tokens_per_step) == (plan.step_s, plan.gpu_peak_bytes, 20)
    assert found.tokens_per_s == 20 / plan.step_s
    assert found.parameters == found.trained_parameters == sum(t.elements for t in a_chain.tensors()) + 1
    assert solved(plan, a_chain, gap=0.01, solve_s=1.0).stages == plan.stages


@pytest.mark.parametrize(
    ("step_s", "lp_step_s", "bound_s", "solver_gap", "status"),
    [
        (1.0, 0.995, 0.5, 0.001, "optimal"),  # near the solver's proven optimum
        (1.0, 0.9, 0.995, 1.0, "optimal"),  # near the bound of any schedule
        (1.0, 0.9, 0.9, 0.0, "feasible"),  # the solver's optimum is proven, and rounding lost much of it
        (1.0, 0.995, 0.9, 0.5, "feasible"),
        (1.0, 0.995, 0.9, 0.008, "feasible"),  # 1.3% above the proven part of the optimum
        (1.0, 0.0, 0.0, 1.0, "feasible"),
    ],
)
def test_optimal_is_what_is_proven(
    step_s: float, lp_step_s: float, bound_s: float, solver_gap: float, status: str
) -> None:
    plan = replace(mixed_plan(), step_s=step_s, lp_step_s=lp_step_s, bound_s=bound_s, solver_gap=solver_gap)
    assert status_of(plan, 0.01) == status


@pytest.mark.parametrize(
    ("bound_s", "lp_step_s", "solver_gap", "words"),
    [
        (9.9, 0.0, 1.0, "within 1.1% of what any schedule takes (9.9 s)"),  # 1.01%, and no more is said than is so
        (
            10.0,
            10.0,
            0.0,
            "within 0.0% of what any schedule takes (10.0 s), "
            "within 0.0% of the best that the planner's program allows",
        ),
        (0.0, 10.0, 0.01, "within 1.1% of the best that the planner's program allows"),  # the solver's own gap counts
        (0.0, 0.0, 1.0, "nothing is proven"),
    ],
)
def test_what_is_proven_is_said_of_which_best_and_rounded_up(
    bound_s: float, lp_step_s: float, solver_gap: float, words: str
) -> None:
    proven = replace(
        solved(mixed_plan(), chain(2), gap=0.01, solve_s=1.0),
        step_s=10.0,
        bound_s=bound_s,
        lp_step_s=lp_step_s,
        solver_gap=solver_gap,
    )
    assert proof(proven) == words


@pytest.mark.parametrize(
    ("bound_s", "lp_step_s", "solver_gap", "word"),
    [
        (9.9, 0.0, 1.0, "good: "),  # 1.01%, which is not within 1%
        (9.95, 0.0, 1.0, "optimal: "),
        (8.0, 9.6, 0.0, "good: "),  # the better proof counts
        (9.0, 9.0, 0.01, "rough, because only whole weights move, where the solver may move any part of them: "),
        (9.0, 10.0, 0.2, "rough, because the solver stopped at the limit of its work: "),
        (9.0, 0.0, 1.0, "rough, because memory is so tight that the solver found no plan, and another method did: "),
    ],
)
def test_how_good_a_plan_is_is_said_in_one_word_first(
    bound_s: float, lp_step_s: float, solver_gap: float, word: str
) -> None:
    figures = {"step_s": 10.0, "bound_s": bound_s, "lp_step_s": lp_step_s, "solver_gap": solver_gap}
    assert quality(replace(mixed_plan(), **figures)).startswith(word)


def test_each_variation_changes_one_thing_for_the_better() -> None:
    problem = problem_of(chain(2))
    found, plan = dict(variations(problem)), made(problem)
    assert len(found) == 6
    assert set(dict(variations(replace(problem, clip=True)))) - set(found) == {NO_CLIPPING}
    for other in found.values():
        assert other != problem
        if other.slices == problem.slices:
            assert predicted_step_s(compile_program(plan, other.chain), other.chain, other.hardware) <= plan.step_s


def test_the_change_that_helps_most_comes_first() -> None:
    # The link is slow and the device small: everything streams through it.
    slow = replace(HARDWARE, h2d_bytes_per_s=100.0, d2h_bytes_per_s=100.0)
    problem = problem_of(replace(chain(4), slice_tokens=10), slow, gpu=7000)
    with Variations() as others:
        plan = made(problem)
        prospects, results = others.changes(problem, plan)
        changes = best_of([change for change in results if change is not None])
    not_planned = unplanned(prospects, changes)
    most = [prospect.most for prospect in prospects]
    assert most == sorted(most, reverse=True) and most[-1] > 1
    factors = {change.text: change.factor for change in changes}
    assert list(factors.values()) == sorted(factors.values(), reverse=True)
    assert factors["8 GiB more GPU memory"] > factors["a link twice as fast"] > 1.2
    assert "64 GiB more RAM" not in {*factors, *(p.text for p in not_planned)}, "the host has more than enough"
    bounds = {text: other.bound_s() for text, other in variations(problem)}
    for prospect in not_planned:
        assert prospect.most == pytest.approx(plan.step_s / bounds[prospect.text])
    for change in changes:
        assert change.tokens_per_s / (10 / plan.step_s) == pytest.approx(change.factor)


def test_what_clipping_costs_is_among_the_changes() -> None:
    """The CPU has as much to do as the device, and must not begin before the norm is known."""
    busy = replace(HARDWARE, h2d_bytes_per_s=10**5, d2h_bytes_per_s=10**5, cpu_update_parameters_per_s=80.0)
    problem = replace(problem_of(replace(chain(4), slice_tokens=10), busy, gpu=7000), clip=True)
    with Variations() as others:
        plan = problem.plan()
        changes = [change for change in others.changes(problem, plan)[1] if change is not None]
    assert {change.text: change.factor for change in changes}[NO_CLIPPING] > 1.1


def test_a_nearly_full_host_is_helped_by_updates_on_the_device() -> None:
    a_chain = chain(6)
    states = sum(t.state_bytes + t.bytes for t in a_chain.tensors())
    host = states + 1000  # the gradients of all would be 8000 and more
    plan = Problem(
        chain=a_chain,
        hardware=HARDWARE,
        gpu_budget_bytes=8000,
        cpu_budget_bytes=host,
        slices=1,
        clip=False,
    ).plan()
    assert plan.cpu_peak_bytes <= host
    assert plan.gpu_peak_bytes <= 8000


def test_a_reference_takes_what_computing_forward_takes_or_the_copies_of_weights_if_these_take_longer() -> None:
    a_chain = chain(2)
    there = resident_plan(a_chain, slices=3)
    forward_s = sum(block.option(name).forward_s for block, name in zip(a_chain.blocks, there.options, strict=True))
    assert reference_s(there, a_chain, HARDWARE) == pytest.approx(3 * forward_s)
    # What is not resident in it is copied for eight micro-batches at once.
    moving = sum(t.bytes for t in a_chain.tensors() if t.name in ("l0.b", "l1.a", "l1.b"))
    slow = replace(HARDWARE, h2d_bytes_per_s=1.0)
    assert reference_s(mixed_plan(), a_chain, slow) == pytest.approx(moving / 8)
