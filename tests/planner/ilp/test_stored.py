"""States on disk in the integer program, on the chain of `tests.planner.ilp.test_oilp`, ten thousand times as large:
two layers with a weight and a gradient of 1 MB each and states of 2 MB, stages of one second, links of 1 MB a second.

The device has room for a weight and its gradient: the CPU updates both. The drive sustains 0.2 MB a second, so that a
layer's states there make a step of ten seconds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.candidate.setting import Budgets, Setting
from planner.ilp.instance import make_instance
from planner.ilp.lower_bound import lower_bound_s
from planner.ilp.program import Solution, solve_oilp
from planner.schedule.chain import Chain, Option
from planner.schedule.memory_use import state_ring_bytes
from planner.schedule.peak_moments import LOSS_BYTES, NORM_BYTES
from tests.planner.ilp.test_oilp import MACHINE, chain, option

LARGER = 10**4
MB = 10**6
DRIVE = replace(
    MACHINE,
    h2d_bytes_per_s=MB,
    d2h_bytes_per_s=MB,
    gpu_update_parameters_per_s=MB,
    cpu_update_parameters_per_s=MB,
    cpu_memory_bytes_per_s=1e12,
    disk_read_bytes_per_s=1e9,
    disk_write_bytes_per_s=1e9,
    disk_bytes=10**12,
    disk_sustained_bytes_per_s=0.2 * MB,
)
ROOM = 2.1  # MB of the device
NO_ROOM = (LOSS_BYTES + 2 * NORM_BYTES) / MB


def large(*options: Option, on_disk: str = "l0.w l1.w") -> Chain:
    """The chain, states of these weights on disk."""

    def grown(t):
        sizes = {name: getattr(t, name) * LARGER for name in ("elements", "bytes", "gradient_bytes", "state_bytes")}
        return replace(t, **sizes, states_on_disk=t.name in on_disk)

    small = chain(*options, trainable=True)
    blocks = tuple(replace(b, tensors=tuple(map(grown, b.tensors))) for b in small.blocks)
    return replace(small, blocks=blocks, piece_elements=1024)


def setting(a_chain: Chain, host_mb: float, *, gpu_mb: float = ROOM, anywhere: bool = True, **of) -> Setting:
    budgets = Budgets(gpu_bytes=int(gpu_mb * MB), cpu_bytes=int(host_mb * MB) + state_ring_bytes(a_chain))
    return Setting(
        chain=a_chain, hardware=replace(DRIVE, **of), budgets=budgets, slices=1, clip=False, states_anywhere=anywhere
    )


def solve(asked: Setting) -> Solution:
    found = solve_oilp(make_instance(asked), gap=0)
    assert found is not None
    return found


@pytest.mark.parametrize(("host_mb", "on_disk_mb"), [(8, 0), (6, 1), (7.9, 1), (4, 2)])
def test_states_that_the_host_has_no_memory_for_are_on_disk_and_no_others(host_mb, on_disk_mb):
    # Weights and gradients are 4 MB, states 4 MB. A layer is one tensor: it is on disk as a whole.
    asked = setting(large(), host_mb)
    found = solve(asked)
    assert sum(found.totals.of["X"]) == pytest.approx(2 * MB)
    assert sum(found.totals.of["V"]) == pytest.approx(on_disk_mb * MB)
    assert sum(found.flows["updV"]) == pytest.approx(on_disk_mb * MB)
    in_memory = solve(setting(large(on_disk=""), 8)).step_s
    assert found.step_s == pytest.approx(max(in_memory, 10 * on_disk_mb))
    assert lower_bound_s(asked) <= found.step_s * (1 + 1e-6)
    if on_disk_mb == 2:  # the bound, which asks where nothing has room on the device at all
        assert lower_bound_s(setting(large(), host_mb, gpu_mb=NO_ROOM)) == pytest.approx(20, rel=1e-4)


def test_all_states_on_disk_together_have_room_there():
    # The host has room for the states of one layer: those of the other, 2 MB, are on disk, or nothing fits.
    found = solve(setting(large(), 6, disk_bytes=2 * MB))
    assert sum(found.totals.of["V"]) == pytest.approx(MB)
    assert solve_oilp(make_instance(setting(large(), 6, disk_bytes=2 * MB - 1000)), gap=0) is None
    assert solve(setting(large(), 6, disk_bytes=0, anywhere=False)).step_s == pytest.approx(20)  # it is decided


def test_what_was_chosen_is_on_disk_and_nothing_else():
    assert solve(setting(large(), 8, anywhere=False)).step_s == pytest.approx(20)
    assert solve(setting(large(on_disk="l1.w"), 6, anywhere=False)).step_s == pytest.approx(10)
    assert solve_oilp(make_instance(setting(large(on_disk="l1.w"), 5, anywhere=False)), gap=0) is None
    assert solve(setting(large(on_disk="l1.w"), 5)).step_s == pytest.approx(20)  # either may be there, or both


def test_a_stage_lasts_as_long_as_its_states_are_read_and_written():
    slow = {"disk_read_bytes_per_s": 0.25 * MB, "disk_write_bytes_per_s": 0.5 * MB, "disk_sustained_bytes_per_s": 0.0}
    # 2 MB are read in 8 s and written in 4 s; the update of l0 follows B1 and precedes F1: B0, F0, and waits in F1.
    one = solve(setting(large(on_disk="l0.w"), 6, anywhere=False, **slow))
    fast = solve(setting(large(on_disk="l0.w"), 6, anywhere=False, disk_sustained_bytes_per_s=0.0))
    assert one.step_s > fast.step_s + 7
    assert lower_bound_s(setting(large(), 4, gpu_mb=NO_ROOM, **slow)) == pytest.approx(24, rel=1e-4)


def test_states_make_way_for_activations_where_that_is_faster():
    slow, sent = option("slow", backward_s=9), option("sent", offloaded=MB // 4)
    quick_drive = {"disk_sustained_bytes_per_s": 0.0}
    found = solve(setting(large(slow, sent), 8, gpu_mb=2.6, **quick_drive))
    kept = solve(setting(large(slow, sent, on_disk=""), 8, gpu_mb=2.6, **quick_drive))
    assert found.options == (0, 1, 1, 0) != kept.options
    assert sum(found.totals.of["V"]) == pytest.approx(MB) and found.step_s < kept.step_s - 5
    no_room = solve(setting(large(slow, sent), 8, gpu_mb=2.6, disk_bytes=MB, **quick_drive))
    assert sum(no_room.totals.of["V"]) == 0 and no_room.step_s > found.step_s + 5


def test_gradients_of_what_is_wholly_on_disk_go_there_in_each_round():
    def wholly(t):
        return replace(t, on_disk=True, elements=MB // 2, state_bytes=6 * MB) if t.states_on_disk else t

    a_chain = large()
    blocks = tuple(replace(b, tensors=tuple(map(wholly, b.tensors))) for b in a_chain.blocks)

    def asked(rounds, host_mb, gpu_mb, **drive):
        of = setting(replace(a_chain, blocks=blocks), host_mb, gpu_mb=gpu_mb, anywhere=False, **drive)
        return replace(of, rounds=rounds)

    quick = {"disk_sustained_bytes_per_s": 0.0, "disk_read_bytes_per_s": 0.2 * MB, "disk_write_bytes_per_s": 0.4 * MB}
    bounds = {}
    for rounds in (1, 2, 4):
        moved = 2 * (6 + 1 + rounds)  # MB of two layers: states, the weight, and the gradient in each round
        assert solve(asked(rounds, 30, 30)).step_s == pytest.approx(moved / 0.2, rel=1e-3)
        assert solve(asked(rounds, 30, 30, **quick)).step_s >= moved / 0.4 + moved / 0.2
        bounds[rounds] = lower_bound_s(asked(rounds, 7.5, ROOM)) / moved  # a part of it need not go there
    assert [bounds[2], bounds[4]] == pytest.approx([bounds[1]] * 2, rel=1e-4) and bounds[1] > 0.8 / 0.2


FAST_LINKS = {
    "h2d_bytes_per_s": 1e12,
    "d2h_bytes_per_s": 1e12,
    "gpu_update_parameters_per_s": 1e12,
    "cpu_update_parameters_per_s": 1e12,
    "disk_sustained_bytes_per_s": 0.0,
    "disk_read_bytes_per_s": 1e6,
    "disk_write_bytes_per_s": 1e6,
}


def clipped(*, masters: bool = True, host_mb: float = 10) -> Setting:
    """States of 6 MB on a drive of 1 MB a second each way; a layer's backward takes 20 s, all else 1 s."""
    a_chain = large(option(backward_s=20))
    sizes = {"elements": MB // 2 if masters else MB // 3, "state_bytes": 6 * MB}
    blocks = tuple(replace(b, tensors=tuple(replace(t, **sizes) for t in b.tensors)) for b in a_chain.blocks)
    asked = setting(replace(a_chain, blocks=blocks), host_mb, anywhere=False, **FAST_LINKS)
    return replace(asked, clip=True)


def test_states_trail_their_weight_where_the_next_backward_has_time_for_them():
    # After the norm 12 s for each layer, in F0 and F1, and B2 and B1 of 20 s, in which the drive has nothing to do. The
    # next gradient of l0 comes in B1, that of l1 in B2: in B2 l0's states, of which 6 s are enough in F0, may follow.
    waiting, found = solve(clipped(masters=False)), solve(clipped())
    assert waiting.step_s == pytest.approx(12 + 12 + 1 + 1 + 20 + 20 + 1, rel=1e-3)
    assert found.step_s == pytest.approx(waiting.step_s - 6, rel=1e-3)
    assert "U" in waiting.totals.of and not any(waiting.totals.of["U"])
    assert found.totals.of["U"] == pytest.approx([0, MB, 0, 0])
    assert sum(found.flows["updU"]) == pytest.approx(MB) == sum(found.flows["restU"][:2])
    assert lower_bound_s(clipped()) <= found.step_s * (1 + 1e-6)


def test_states_trail_only_where_the_host_has_room_for_the_gradient_beside_the_weight():
    # Weights take 2 MB: their gradients come in their places.
    assert sum(solve(clipped(host_mb=3.1)).totals.of["U"]) == pytest.approx(MB)
    assert sum(solve(clipped(host_mb=2.9)).totals.of["U"]) == 0
