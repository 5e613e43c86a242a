"""Drafts moved about to fit, and to be faster: what moves, and that whatever moves stays right."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.chain import Chain
from planner.greedy import Setting, profile, streamed
from planner.hardware import Hardware
from planner.instance import Budgets
from planner.itinerary import Draft, Itinerary, Side, Trip, assemble, at_home
from planner.memory import gpu_peak_bytes, gpu_usage
from planner.plan import Plan
from planner.polish import Rating, critical_waits, polished
from planner.program import OpKind, Program, compile_program, order_program
from planner.simulate import simulate
from planner.tighten import tightened
from planner.verify import verify
from tests import chains as small
from tests.random_chains import chains, machines


def plan_of(chain: Chain, draft: Draft) -> Plan:
    return assemble(chain, draft, slices=1, clip=False)


def room_bytes(chain: Chain, draft: Draft, budget: int) -> list[int]:
    plan = plan_of(chain, draft)
    peaks = {stage.name: 0 for stage in plan.stages}
    for usage in gpu_usage(order_program(plan, chain), chain):
        peaks[usage.op.stage] = max(peaks[usage.op.stage], usage.peak_bytes)
    return [budget - peak for peak in peaks.values()]


def rating_of(chain: Chain, hardware: Hardware, budget: int, draft: Draft) -> Rating:
    plan = plan_of(chain, draft)
    program = compile_program(plan, chain)
    step_s = simulate(program, chain, hardware).step_s
    return Rating(plan=plan, program=program, step_s=step_s, room_bytes=room_bytes(chain, draft, budget))


def streamed_draft(chain: Chain, hardware: Hardware, *, ahead: bool) -> Draft:
    budgets = Budgets(gpu_bytes=10**9, cpu_bytes=10**9)
    setting = Setting(chain=chain, hardware=hardware, budgets=budgets, slices=1, clip=False)
    return streamed(setting, profile(setting, "recompute"), ahead=ahead, source="test")


def test_where_a_stage_is_too_full_what_it_does_not_read_comes_later() -> None:
    chain = small.chain(2)
    tensor = chain.blocks[2].tensors[0]
    home = [at_home(chain, t, False) for t in chain.tensors() if t.name != tensor.name]
    early = Itinerary(
        tensor=tensor, side=Side.CPU, send=4, drop=4, update=5, weight=(Trip(evict=4, prefetch=0),)
    )  # fmt: skip
    draft = Draft(options=("keep",) * 4, journeys=(*home, early), source="test")
    room = [0] * 7
    room[0] = -1
    moved = next(j for j in tightened(chain, draft, room).journeys if j.tensor == tensor)
    assert moved.weight == (Trip(evict=4, prefetch=1),)
    room[1] = -2 * tensor.bytes
    moved = next(j for j in tightened(chain, draft, room).journeys if j.tensor == tensor)
    assert moved.weight == (Trip(evict=4, prefetch=2),)  # it is read there


def test_the_critical_waits_name_a_fetch_that_nothing_hides() -> None:
    chain = small.chain(3)
    program = compile_program(plan_of(chain, streamed_draft(chain, small.HARDWARE, ahead=False)), chain)
    waits = critical_waits(program, chain, small.HARDWARE)
    assert any(wait.op.kind is OpKind.RUN and wait.on.kind is OpKind.FETCH for wait in waits)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), hardware=machines(), share=st.floats(0.0, 1.0))
def test_what_is_tightened_is_right_and_never_needs_more(chain: Chain, hardware: Hardware, share: float) -> None:
    draft = streamed_draft(chain, hardware, ahead=True)
    before = compile_program(plan_of(chain, draft), chain)
    most = gpu_peak_bytes(before, chain)
    tight = tightened(chain, draft, room_bytes(chain, draft, int(share * most)))
    program = compile_program(plan_of(chain, tight), chain)
    verify(program, chain, gpu_budget_bytes=most)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), hardware=machines(), room=st.integers(0, 2000))
def test_what_is_polished_is_right_faster_each_time_and_within_the_budget(
    chain: Chain, hardware: Hardware, room: int
) -> None:
    draft = streamed_draft(chain, hardware, ahead=False)
    budget = gpu_peak_bytes(compile_program(plan_of(chain, draft), chain), chain) + room
    step_s = rating_of(chain, hardware, budget, draft).step_s

    def rate(candidate: Draft) -> Rating:
        return rating_of(chain, hardware, budget, candidate)

    for found in polished(chain, hardware, draft, rate, tries=3, go_on=lambda _: True):
        program: Program = rate(found).program
        verify(program, chain, gpu_budget_bytes=budget)
        assert rate(found).step_s < step_s
        step_s = rate(found).step_s
