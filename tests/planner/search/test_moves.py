"""Drafts moved about to fit, and to be faster: what moves, and that whatever moves stays right."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.draft.absences import with_lead
from planner.draft.draft import Draft, Journey, Side, Trip, assemble, at_home
from planner.draft.evaluate import Look, Rating
from planner.draft.setting import Budgets, Setting
from planner.greedy.streaming import PROFILES, profile, streamed
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.compile import OpKind, Program, compile_program, order_program
from planner.schedule.memory import gpu_peak_bytes, gpu_usage
from planner.schedule.plan import Plan
from planner.schedule.simulate import ordered_step_s, simulate
from planner.schedule.verify import verify
from planner.search.anneal import changes, moves_of, shifted
from planner.search.critical_path import critical_waits, polished
from planner.search.list_schedule import Manner, timed
from planner.search.repair import tightened
from planner.search.stage_model import Board
from planner.search.swap_decisions import _Changes, exchanged
from tests.support import chains as small
from tests.support.llama import GB, RTX_3060, llama
from tests.support.random_chains import chains, machines


def plan_of(chain: Chain, draft: Draft) -> Plan:
    return assemble(chain, draft, slices=1, clip=False)


def room_bytes(chain: Chain, draft: Draft, budget: int) -> list[int]:
    return free_bytes(chain, plan_of(chain, draft), budget)


def rating_of(chain: Chain, hardware: Hardware, budget: int, draft: Draft) -> Rating:
    plan = plan_of(chain, draft)
    program = compile_program(plan, chain)
    step_s = simulate(program, chain, hardware).step_s
    return Rating(plan=plan, program=program, step_s=step_s, room_bytes=room_bytes(chain, draft, budget))


def setting_of(chain: Chain, hardware: Hardware, *, slices: int = 1, clip: bool = False) -> Setting:
    budgets = Budgets(gpu_bytes=10**12, cpu_bytes=10**12)
    return Setting(chain=chain, hardware=hardware, budgets=budgets, slices=slices, clip=clip)


def free_bytes(chain: Chain, plan: Plan, budget: int) -> list[int]:
    """Per stage, what the plan leaves of the budget."""
    peaks = {stage.name: 0 for stage in plan.stages}
    for usage in gpu_usage(order_program(plan, chain), chain):
        peaks[usage.op.stage] = max(peaks[usage.op.stage], usage.peak_bytes)
    return [budget - peak for peak in peaks.values()]


def streamed_draft(chain: Chain, hardware: Hardware, *, ahead: bool) -> Draft:
    setting = setting_of(chain, hardware)
    return streamed(setting, profile(setting, "recompute"), ahead=ahead, source="test")


def test_where_a_stage_is_too_full_what_it_does_not_read_comes_later() -> None:
    chain = small.chain(2)
    tensor = chain.blocks[2].tensors[0]
    home = [at_home(chain, t, False) for t in chain.tensors() if t.name != tensor.name]
    early = Journey(
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


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), hardware=machines(), slices=st.sampled_from((1, 3)), clip=st.booleans(), ahead=st.booleans())
def test_without_waits_a_step_takes_what_it_takes_with_them(
    chain: Chain, hardware: Hardware, slices: int, clip: bool, ahead: bool
) -> None:
    setting = setting_of(chain, hardware, slices=slices, clip=clip)
    draft = streamed(setting, profile(setting, "offload"), ahead=ahead, source="test")
    plan = assemble(chain, draft, slices=slices, clip=clip)
    expected = simulate(compile_program(plan, chain), chain, hardware).step_s
    assert ordered_step_s(order_program(plan, chain), chain, hardware) == expected


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chain=chains(), hardware=machines(), slices=st.sampled_from((1, 3)), clip=st.booleans(),
    options=st.sampled_from(PROFILES), lead=st.integers(0, 2), room=st.integers(0, 5000),
    ahead=st.sampled_from((0.0, 0.5)), overtake=st.booleans(),
)  # fmt: skip
def test_what_is_played_is_right(
    chain: Chain, hardware: Hardware, slices: int, clip: bool, options: str, lead: int, room: int, ahead: float,
    overtake: bool,
) -> None:  # fmt: skip
    setting = setting_of(chain, hardware, slices=slices, clip=clip)
    draft = streamed(setting, profile(setting, options), ahead=True, source="test")
    draft = with_lead(setting, draft, lead)
    plan = assemble(chain, draft, slices=slices, clip=clip)
    verify(compile_program(plan, chain), chain)
    budget = gpu_peak_bytes(order_program(plan, chain), chain) + room
    free = free_bytes(chain, plan, budget)
    played = timed(setting, draft, plan, free, Manner(ahead=ahead, overtake=overtake))
    after = assemble(chain, played, slices=slices, clip=clip)
    verify(compile_program(after, chain), chain)
    assert after.cpu_updated() == plan.cpu_updated()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chain=chains(), hardware=machines(), slices=st.sampled_from((1, 3)), options=st.sampled_from(PROFILES),
    lead=st.integers(0, 2), seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_board_knows_the_step_and_the_room_of_its_draft_wherever_its_legs_are_put(
    chain: Chain, hardware: Hardware, slices: int, options: str, lead: int, seed: int
) -> None:
    setting, chance = setting_of(chain, hardware, slices=slices), random.Random(seed)
    draft = streamed(setting, profile(setting, options), ahead=True, source="test")
    fates = _Changes(setting)
    assume(fates.tensors)
    fates.chance = chance
    for _ in range(5):
        draft = fates.of(draft)
    draft = with_lead(setting, draft, lead)
    plan = assemble(chain, draft, slices=slices, clip=False)
    board = Board(setting, draft, plan, free_bytes(chain, plan, 10**6))
    moves = moves_of(board)
    assume(moves)
    for _ in range(5):
        plan = assemble(chain, board.drafted(), slices=slices, clip=False)
        verify(compile_program(plan, chain), chain)
        assert board.room == free_bytes(chain, plan, 10**6)
        assert board.step_s() == simulate(compile_program(plan, chain), chain, hardware).step_s
        for n, place in changes(board, moves, chance, 5):
            board.put(n, place)


def test_what_is_shifted_is_faster_and_fits() -> None:
    """With all in the very stage that needs it, in whose time nothing else is copied."""
    chain = llama(6)
    setting = setting_of(chain, RTX_3060)
    draft = streamed(setting, profile(setting, "recompute"), ahead=False, source="test")

    def look(candidate: Draft) -> Look:
        plan = plan_of(chain, candidate)
        step_s = simulate(compile_program(plan, chain), chain, RTX_3060).step_s
        return Look(plan=plan, room_bytes=free_bytes(chain, plan, 6 * GB), host_bytes=0, step_s=step_s)

    found = shifted(setting, draft, look, attempts=500, go_on=lambda _: True)
    verify(compile_program(plan_of(chain, found), chain), chain, gpu_budget_bytes=6 * GB)
    assert look(found).step_s < 0.9 * look(draft).step_s
    assert shifted(setting, draft, look, attempts=500, go_on=lambda step_s: step_s > 10**6) is draft


def test_with_room_a_plan_that_waits_for_every_weight_is_played_until_the_cpu_is_nearly_always_busy() -> None:
    """All updates but the embedding's are on the CPU, which has nothing to do while the head runs."""
    chain = llama(6)
    setting = setting_of(chain, RTX_3060)
    first = frozenset(tensor.name for tensor in chain.blocks[0].tensors)
    exposed = streamed(setting, profile(setting, "recompute"), ahead=False, gpu_updated=first, source="test")
    plan = plan_of(chain, exposed)
    played = timed(setting, exposed, plan, free_bytes(chain, plan, 12 * GB), Manner())
    before = simulate(compile_program(plan, chain), chain, RTX_3060)
    after = simulate(compile_program(plan_of(chain, played), chain), chain, RTX_3060)
    slowest = max(seconds for _, seconds in after.busy_s)
    assert after.step_s <= 1.1 * slowest
    assert before.step_s > 1.2 * slowest


def test_single_tensors_get_other_fates_as_long_as_the_step_gets_shorter() -> None:
    """There is room for everything, and the draft has everything travel."""
    chain, setting = small.chain(3), setting_of(small.chain(3), small.HARDWARE)
    draft = streamed(setting, profile(setting, "fast"), ahead=True, source="test")

    def look(candidate: Draft) -> Look:
        plan = plan_of(chain, candidate)
        step_s = simulate(compile_program(plan, chain), chain, small.HARDWARE).step_s
        return Look(plan=plan, room_bytes=free_bytes(chain, plan, 10**6), host_bytes=10**6, step_s=step_s)

    before = look(draft).step_s
    found = exchanged(setting, draft, look, attempts=50, shifts=20, go_on=lambda _: True)
    verify(compile_program(plan_of(chain, found), chain), chain)
    assert look(found).step_s < 0.9 * before
