"""Each constraint family on a chain small enough to solve by hand.

Two layers between an embedding and a head without tensors: stages F0 F1 F2 H B2 B1 B0 of one second each, so a step is
seven seconds before anything moves. A layer's weight is 100 bytes, 25 parameters; links move 100 bytes a second.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from planner.candidate.setting import Budgets, Setting
from planner.ilp.instance import make_instance
from planner.ilp.program import Solution, solve_oilp
from planner.machine.hardware import Hardware
from planner.optimizers.muon import Muon
from planner.schedule.chain import Block, Chain, Option, Tensor
from planner.schedule.memory_use import products_bytes
from tests.support.chains import with_masters
from tests.support.stage_barriers import stage_barriers

PLENTY = 10**6


def weight(name: str, trainable: bool) -> Tensor:
    """100 bytes; with 100 of gradients and 200 of states where it is trained."""
    return Tensor(
        name=name,
        elements=25,
        bytes=100,
        gradient_bytes=100 * trainable,
        state_bytes=200 * trainable,
        trainable=trainable,
    )


def option(
    name: str = "keep", *, saved: int = 0, offloaded: int = 0, forward_s: float = 1, backward_s: float = 1
) -> Option:
    return Option(
        name=name,
        saved_bytes=saved,
        offloaded_bytes=offloaded,
        forward_s=forward_s,
        backward_s=backward_s,
        reads_input=False,
    )


def chain(
    *options: Option, layers: int = 2, trainable: bool = False, head_peak: int = 0, narrow_head: bool = False
) -> Chain:
    end = Option(name="keep", forward_s=1, backward_s=0, forward_peak_bytes=head_peak)
    middle = [
        Block(name=f"l{i}", kind="layer", tensors=(weight(f"l{i}.w", trainable),), options=options or (option(),))
        for i in range(layers)
    ]
    return Chain(
        blocks=(
            Block(name="embedding", kind="e", tensors=(), options=(option(),)),
            *middle,
            Block(name="head", kind="h", tensors=(), options=(end,)),
        )
    )


MACHINE = Hardware(
    name="hand",
    gpu_bytes=PLENTY,
    cpu_bytes=PLENTY,
    h2d_bytes_per_s=100,
    d2h_bytes_per_s=100,
    gpu_update_parameters_per_s=25,
    cpu_update_parameters_per_s=25,
    cpu_memory_bytes_per_s=10**6,
)


def solve(
    a_chain: Chain,
    machine: Hardware = MACHINE,
    *,
    gpu: int = PLENTY,
    cpu: int = PLENTY,
    slices: int = 1,
    clip: bool = False,
    barrier: bool = True,
    **freedom: bool,
) -> Solution | None:
    budgets = Budgets(gpu_bytes=gpu, cpu_bytes=cpu, **freedom)
    instance = make_instance(Setting(chain=a_chain, hardware=machine, budgets=budgets, slices=slices, clip=clip))
    return solve_oilp(instance, gap=0, more=stage_barriers if barrier else None)


def test_what_muon_multiplies_in_is_on_the_host_where_a_matrix_is_updated_there_and_only_then():
    def muons(t: Tensor) -> Tensor:
        return replace(t, state_bytes=100, optimizer=Muon(shorter_side=5, cpu_s=1.0))

    blocks = chain(trainable=True).blocks
    matrices = Chain(blocks=tuple(replace(b, tensors=tuple(map(muons, b.tensors))) for b in blocks))
    products, weights = products_bytes(matrices), 2 * 300  # with gradients and momenta
    found = {host: solve(matrices, cpu=host, barrier=False) for host in (0, products, products + weights)}
    assert [sum(found[host].totals.of["X"]) for host in found] == pytest.approx([0, 0, 200])
    assert [found[host].step_s for host in found] == pytest.approx([9, 9, 7])
    little = solve(matrices, cpu=products + weights - 3, barrier=False)
    assert sum(little.totals.of["X"]) == pytest.approx(199)


@pytest.mark.parametrize(("packs", "rounds", "beside"), [(False, 1, 0), (True, 1, 0), (False, 2, 1), (True, 2, 0)])
def test_the_host_has_memory_for_a_gradient_in_rounds_only_and_none_where_states_are_packed(packs, rounds, beside):
    narrow = with_masters(chain(trainable=True))
    budgets = Budgets(gpu_bytes=PLENTY, cpu_bytes=PLENTY)
    setting = Setting(
        chain=replace(narrow, packs=packs), hardware=MACHINE, budgets=budgets, slices=1, rounds=rounds, clip=True
    )
    instance = make_instance(setting)
    assert instance.host_gradient_ratio == beside
    assert {spread.most for spread in instance.host_gradient_spread} == {0, beside}


def running(amounts: list[float]) -> list[float]:
    return list(accumulate(amounts))


def step_s(*args: object, **keywords: object) -> float:
    solution = solve(*args, **keywords)  # type: ignore[arg-type]
    assert solution is not None
    return solution.step_s


def test_eq_4_1_each_block_gets_the_one_option_that_is_fastest() -> None:
    slow, fast = option("slow", forward_s=3), option("fast")
    solution = solve(chain(slow, fast))
    assert solution is not None
    assert solution.options == (0, 1, 1, 0)
    assert solution.step_s == pytest.approx(7)


def test_eq_4_5_weights_that_do_not_fit_together_are_fetched_before_each_use() -> None:
    # Both layers fit: nothing moves. One fits: layer 1 comes in F2 itself, layer 0 in B1 itself, a second each.
    assert step_s(chain(), gpu=200) == pytest.approx(7)
    assert step_s(chain(), gpu=100) == pytest.approx(9)
    # With room for one and a half, only half of each is away.
    assert step_s(chain(), gpu=150) == pytest.approx(8)


def test_eq_4_6_4_8_4_10_states_that_leave_are_back_for_their_update() -> None:
    # At the head there is room for the weight and not for its states: they come in B1 itself, in 2 s, and leave during
    # B0, F0, F1. The update takes a second.
    one = chain(layers=1, trainable=True, head_peak=900)
    assert step_s(one, gpu=1200, cpu_updates=False) == pytest.approx(5 + 1)
    assert step_s(one, gpu=1000, cpu_updates=False) == pytest.approx(5 + 1 + 2)


def test_eq_4_11_to_4_13_a_cpu_update_follows_its_gradient_and_is_followed_by_the_fetch() -> None:
    # Gradients of l1 (B2) and l0 (B1) leave in the stage after and are updated in it; all is back for F1: for free.
    solution = solve(chain(trainable=True))
    assert solution is not None
    assert solution.step_s == pytest.approx(7)
    assert sum(solution.totals.of["X"]) == pytest.approx(200)
    sent, updated, fetched = (running(solution.flows[name]) for name in ("send_X", "update", "fetch_X"))
    assert all(u <= s + 1e-3 for s, u in zip(sent, updated, strict=True))
    assert all(f <= u + 1e-3 for u, f in zip(updated, fetched[1:], strict=False))


def test_updates_that_may_not_be_on_the_cpu_take_the_devices_time() -> None:
    assert step_s(chain(trainable=True), cpu_updates=False) == pytest.approx(9)


def test_eq_4_17_saved_activations_of_all_blocks_below_count() -> None:
    keep, again = option(saved=300), option("recompute", backward_s=2)
    assert step_s(chain(keep, again), gpu=800) == pytest.approx(7)
    solution = solve(chain(keep, again), gpu=500)
    assert solution is not None
    assert solution.step_s == pytest.approx(8)
    assert sorted(solution.options[1:3]) == [0, 1]
    assert solve(chain(keep), gpu=500) is None


def test_eq_4_17_gradients_of_the_running_block_count() -> None:
    # All resident: weights 200, states 400, and 100 of gradients in each backward.
    assert step_s(chain(trainable=True), gpu=700, cpu_updates=False) == pytest.approx(9)
    assert step_s(chain(trainable=True), gpu=699, cpu_updates=False) > 9.001


def test_eq_4_18_the_host_holds_a_copy_of_all_that_ever_leaves() -> None:
    assert step_s(chain(), gpu=150, cpu=100) == pytest.approx(8)
    assert solve(chain(), gpu=150, cpu=90) is None


def test_eq_4_21_4_22_offloaded_activations_take_the_links_time_both_ways() -> None:
    # 200 bytes a layer at 100 bytes a second. They leave in the turn after their forward: F2 and H take 2 s instead of
    # 1. Both come back in B2, the second layer's for itself: 4 s instead of 1.
    assert step_s(chain(option(offloaded=200))) == pytest.approx(7 + 1 + 1 + 3)
    faster_up = replace(MACHINE, h2d_bytes_per_s=200)
    assert step_s(chain(option(offloaded=200)), faster_up) == pytest.approx(7 + 1 + 1 + 1)


def test_with_several_slices_all_but_one_slices_activations_travel_in_their_own_stage() -> None:
    # Two slices of 100 bytes: F1 1 s in 2, F2 and H 2 s in 2 …, B2 has 1 of its own and 1 of the next layer's.
    assert step_s(chain(option(offloaded=100)), slices=2) == pytest.approx(14)


def test_eq_4_23_a_slow_cpu_updates_only_what_it_can_in_the_time_there_is() -> None:
    # A tenth of the speed: in the three stages between l1's gradient and its fetch the CPU does 7.5 of 25 parameters.
    slow = replace(MACHINE, cpu_update_parameters_per_s=2.5)
    solution = solve(chain(trainable=True), slow, barrier=False)
    assert solution is not None
    assert 7 < solution.step_s < 9
    updated = sum(solution.totals.of["X"]) / 4
    assert updated <= 2.5 * solution.step_s + 1e-6


def test_transfers_in_both_directions_share_the_hosts_memory() -> None:
    slow_host = replace(MACHINE, cpu_memory_bytes_per_s=50)
    # 4 s in F2 and in H, 8 s in B2.
    assert step_s(chain(option(offloaded=200)), slow_host) == pytest.approx(4 + 4 + 4 + 8)


def test_launching_is_total_work_not_a_floor_under_every_stage() -> None:
    # Seven stages of half a second to launch hide behind seven seconds of work, wherever the work is.
    uneven = chain(option(forward_s=0.1, backward_s=1.9))
    assert step_s(uneven, replace(MACHINE, launch_s=0.5)) == pytest.approx(7)
    assert step_s(uneven, replace(MACHINE, launch_s=2.0)) == pytest.approx(14)


def test_slices_multiply_computing_and_activations_and_not_weights() -> None:
    assert step_s(chain(option(saved=100)), gpu=100 * 2 * 3 + 200, slices=3) == pytest.approx(21)
    assert solve(chain(option(saved=100)), gpu=100 * 2 * 3 + 99, slices=3) is None
    # With twice the computing, a weight that is fetched in the very stage still costs one second.
    assert step_s(chain(), gpu=100, slices=2) == pytest.approx(14 + 2)


def test_with_clipping_no_update_begins_before_the_last_backward_has_ended() -> None:
    solution = solve(chain(layers=4, trainable=True), clip=True)
    assert solution is not None
    blocks = 6
    assert sum(solution.totals.of["X"]) > 0
    assert sum(solution.flows["update"][:blocks]) == pytest.approx(0, abs=1e-6)


def test_with_clipping_gradients_wait_on_the_device_for_its_updates() -> None:
    # 200 weights, 400 states, and at the end both gradients, their norms and the loss.
    assert step_s(chain(trainable=True), gpu=812, clip=True, cpu_updates=False) == pytest.approx(9)
    assert solve(chain(trainable=True), gpu=811, clip=True, cpu_updates=False) is None


def test_an_unlimited_budget_is_a_number_like_any_other() -> None:
    assert step_s(chain(trainable=True), gpu=2**62, cpu=2**62, cpu_updates=False) == pytest.approx(9)
