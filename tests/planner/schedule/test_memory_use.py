"""What the bytes on the device are for: the parts of the walk's figures."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.candidate.candidate import assemble
from planner.candidate.setting import Budgets, Setting
from planner.greedy.streaming import candidates
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import Parts, gpu_breakdown, gpu_peak_bytes, gpu_usage, parts_at_peak
from tests.support import chains as small
from tests.support import random_chains


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chain=random_chains.chains(),
    hardware=random_chains.machines(),
    slices=st.sampled_from((1, 2, 3)),
    clip=st.booleans(),
)
def test_parts_are_never_negative_and_add_up_to_the_walk(
    chain: Chain, hardware: Hardware, slices: int, clip: bool
) -> None:
    budgets = Budgets(gpu_bytes=10**9, cpu_bytes=10**9)
    setting = Setting(chain=chain, hardware=hardware, budgets=budgets, slices=slices, clip=clip)
    for candidate in candidates(setting, lambda _: True):
        program = compile_program(assemble(chain, candidate, slices=slices, clip=clip), chain)
        found = list(gpu_breakdown(program, chain))
        assert [b.usage for b in found] == list(gpu_usage(program, chain))
        for b in found:
            assert b.peak.total_bytes == b.usage.peak_bytes
            assert b.after.total_bytes == b.usage.after_bytes
            assert all(getattr(p, f.name) >= 0 for p in (b.peak, b.after) for f in fields(Parts))
        assert parts_at_peak(program, chain).usage.peak_bytes == gpu_peak_bytes(program, chain)


def test_parts_of_a_resident_plan_are_those_one_can_count_by_hand() -> None:
    chain = small.chain(layers=1)
    program = compile_program(small.resident_plan(chain), chain)
    found = {b.usage.op.name: b for b in gpu_breakdown(program, chain)}
    # 500 elements: 4 bytes of weight and 8 of states each. The layer keeps 1000 bytes and its input.
    assert found["run@B1:B1.0"].peak == Parts(
        frame_bytes=10, weights_bytes=2000, states_bytes=4000, saved_bytes=1050, running_bytes=50 + 100 + 1200
    )
    assert found["run@B1:B1.0"].after == Parts(
        frame_bytes=10, weights_bytes=2000, gradients_bytes=1200, states_bytes=4000, waiting_bytes=50
    )


def test_offloaded_activations_are_a_part_while_they_leave_and_come_back() -> None:
    chain = small.chain(layers=3)
    program = compile_program(small.resident_plan(chain, option="offload"), chain)
    found = {b.usage.op.name: b.after.offloaded_bytes for b in gpu_breakdown(program, chain)}
    assert found["run@F1:F1.0"] == 500
    assert found["free@F2:a:1.0"] == 500  # block 2's are leaving
    assert found["free@H4:a:3.0"] == 0
    assert found["alloc@B3:a:3.0"] == 500  # what is needed first comes first
    assert found["alloc@B3:a:2.0"] == 1000
