"""Candidates moved about to fit, and to be faster: what moves, and that whatever moves stays right."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.candidate.absence_windows import with_lead
from planner.candidate.candidate import Absence, Candidate, Side, TensorSchedule, assemble, at_home
from planner.candidate.evaluate import evaluate
from planner.candidate.setting import Budgets, Setting
from planner.greedy.streaming import PROFILES, profile, streamed
from planner.machine.hardware import Hardware
from planner.schedule.activation_turns import activation_turns
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program, order_program
from planner.schedule.memory_use import gpu_peak_bytes, gpu_usage
from planner.schedule.plan import Plan
from planner.schedule.simulate import simulate
from planner.schedule.verify import verify
from planner.search.improve import _decided, _moved, improved
from planner.search.list_schedule import Manner, timed
from planner.search.repair import tightened
from tests.support import chains as small
from tests.support.llama import GB, RTX_3060, llama
from tests.support.random_chains import chains, machines


def plan_of(chain: Chain, candidate: Candidate) -> Plan:
    return assemble(chain, candidate, slices=1, clip=False)


def room_bytes(chain: Chain, candidate: Candidate, budget: int) -> list[int]:
    return free_bytes(chain, plan_of(chain, candidate), budget)


def setting_of(chain: Chain, hardware: Hardware, *, slices: int = 1, clip: bool = False) -> Setting:
    budgets = Budgets(gpu_bytes=10**12, cpu_bytes=10**12)
    return Setting(chain=chain, hardware=hardware, budgets=budgets, slices=slices, clip=clip)


def free_bytes(chain: Chain, plan: Plan, budget: int) -> list[int]:
    """Per stage, what the plan leaves of the budget."""
    peaks = {stage.name: 0 for stage in plan.stages}
    for usage in gpu_usage(order_program(plan, chain), chain):
        peaks[usage.op.stage] = max(peaks[usage.op.stage], usage.peak_bytes)
    return [budget - peak for peak in peaks.values()]


def streamed_candidate(chain: Chain, hardware: Hardware, *, ahead: bool) -> Candidate:
    setting = setting_of(chain, hardware)
    return streamed(setting, profile(setting, "recompute"), ahead=ahead, source="test")


def test_where_a_stage_is_too_full_what_it_does_not_read_comes_later() -> None:
    chain = small.chain(2)
    tensor = chain.blocks[2].tensors[0]
    home = [at_home(chain, t, False) for t in chain.tensors() if t.name != tensor.name]
    early = TensorSchedule(
        tensor=tensor, side=Side.CPU, send=4, drop=4, update=5, weight=(Absence(evict=4, prefetch=0),)
    )
    candidate = Candidate(options=("keep",) * 4, schedules=(*home, early), source="test")
    room = [0] * 7
    room[0] = -1
    moved = next(j for j in tightened(chain, candidate, room).schedules if j.tensor == tensor)
    assert moved.weight == (Absence(evict=4, prefetch=1),)
    room[1] = -2 * tensor.bytes
    moved = next(j for j in tightened(chain, candidate, room).schedules if j.tensor == tensor)
    assert moved.weight == (Absence(evict=4, prefetch=2),)  # it is read there


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), hardware=machines(), share=st.floats(0.0, 1.0))
def test_what_is_tightened_is_right_and_never_needs_more(chain: Chain, hardware: Hardware, share: float) -> None:
    candidate = streamed_candidate(chain, hardware, ahead=True)
    before = compile_program(plan_of(chain, candidate), chain)
    most = gpu_peak_bytes(before, chain)
    tight = tightened(chain, candidate, room_bytes(chain, candidate, int(share * most)))
    program = compile_program(plan_of(chain, tight), chain)
    verify(program, chain, gpu_budget_bytes=most)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chain=chains(),
    hardware=machines(),
    slices=st.sampled_from((1, 3)),
    clip=st.booleans(),
    options=st.sampled_from(PROFILES),
    lead=st.integers(0, 2),
    room=st.integers(0, 5000),
    ahead=st.sampled_from((0.0, 0.5)),
    overtake=st.booleans(),
)
def test_what_is_played_is_right(
    chain: Chain,
    hardware: Hardware,
    slices: int,
    clip: bool,
    options: str,
    lead: int,
    room: int,
    ahead: float,
    overtake: bool,
) -> None:
    setting = setting_of(chain, hardware, slices=slices, clip=clip)
    candidate = streamed(setting, profile(setting, options), ahead=True, source="test")
    candidate = with_lead(setting, candidate, lead)
    plan = assemble(chain, candidate, slices=slices, clip=clip)
    verify(compile_program(plan, chain), chain)
    budget = gpu_peak_bytes(order_program(plan, chain), chain) + room
    free = free_bytes(chain, plan, budget)
    played = timed(setting, candidate, plan, free, Manner(ahead=ahead, overtake=overtake))
    after = assemble(chain, played, slices=slices, clip=clip)
    verify(compile_program(after, chain), chain)
    assert after.cpu_updated() == plan.cpu_updated()


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


def test_what_the_step_hangs_on_moves_until_nothing_is_gained() -> None:
    """With all in the very stage that needs it, in whose time nothing else is copied."""
    chain = llama(6)
    setting = replace(setting_of(chain, RTX_3060), budgets=Budgets(gpu_bytes=6 * GB, cpu_bytes=10**12))
    candidate = streamed(setting, profile(setting, "recompute"), ahead=False, source="test")
    before = evaluate(setting, candidate)
    after = _moved(setting, before, goal_s=0.0)
    verify(compile_program(after.plan, chain), chain, gpu_budget_bytes=6 * GB)
    assert after == evaluate(setting, after.candidate)
    assert after.step_s < 0.95 * before.step_s
    assert _moved(setting, before, goal_s=10**6) is before


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chain=chains(), hardware=machines(), slices=st.sampled_from((1, 3)), clip=st.booleans(), room=st.integers(0, 2000)
)
def test_what_is_improved_is_right_no_slower_and_within_the_budget(
    chain: Chain, hardware: Hardware, slices: int, clip: bool, room: int
) -> None:
    setting = setting_of(chain, hardware, slices=slices, clip=clip)
    candidate = streamed(setting, profile(setting, "offload"), ahead=True, source="test")
    plan = assemble(chain, candidate, slices=slices, clip=clip)
    budget = gpu_peak_bytes(order_program(plan, chain), chain) + room
    setting = replace(setting, budgets=Budgets(gpu_bytes=budget, cpu_bytes=10**12))
    found = improved(setting, evaluate(setting, candidate), 0.0, 0.0)
    program = compile_program(found.plan, chain)
    verify(program, chain, gpu_budget_bytes=budget)
    assert found == evaluate(setting, found.candidate)
    assert found.step_s <= evaluate(setting, candidate).step_s


def test_single_tensors_get_other_fates_as_long_as_the_step_gets_shorter() -> None:
    """There is room for everything, and the candidate has everything travel."""
    chain, setting = small.chain(3), setting_of(small.chain(3), small.HARDWARE)
    candidate = streamed(setting, profile(setting, "fast"), ahead=True, source="test")
    before = evaluate(setting, candidate)
    after = _decided(setting, before, near_s=0.0)
    verify(compile_program(after.plan, chain), chain)
    assert after.step_s < 0.9 * before.step_s
    assert _decided(setting, before, near_s=before.step_s) is before


def every_other_layer_offloaded(*, layers: int, gpu_bytes: int) -> tuple[Setting, Candidate]:
    """A copy of 500 bytes lasts 0.5 s, a layer's forward 0.4 s: over two layers there is time for one copy."""
    chain = small.chain(layers)
    blocks = [replace(b, options=tuple(replace(o, forward_s=0.4) for o in b.options)) for b in chain.blocks]
    chain = replace(chain, blocks=tuple(blocks))
    budgets = Budgets(gpu_bytes=gpu_bytes, cpu_bytes=10**6)
    setting = Setting(chain=chain, hardware=small.HARDWARE, budgets=budgets, slices=1, clip=False)
    options = ("keep", *("offload" if i % 2 else "recompute" for i in range(layers)), "keep")
    schedules = tuple(at_home(chain, t, False) for t in chain.tensors())
    return setting, Candidate(options=options, schedules=schedules, source="test")


def test_activations_are_copied_for_longer_where_that_is_faster_and_fits() -> None:
    setting, candidate = every_other_layer_offloaded(layers=8, gpu_bytes=10**6)
    before = evaluate(setting, candidate)
    after = improved(setting, before, 0.0, before.step_s)
    assert after.candidate.copy_turns == 2
    assert round(before.step_s - after.step_s, 6) == 0.3, "three copies to the host were each 0.1 s longer than a turn"
    tight, _ = every_other_layer_offloaded(layers=8, gpu_bytes=10**6 - min(before.room_bytes))
    assert improved(tight, evaluate(tight, candidate), 0.0, before.step_s).candidate.copy_turns == 1


def test_copied_activations_are_gone_before_they_come_back_and_are_there_for_their_backward() -> None:
    for layers, slices, turns in itertools.product((1, 2, 5), (1, 3), (1, 2, 3, 20)):
        chain = small.chain(layers)
        options = ("keep", *["offload"] * layers, "keep")
        schedules = tuple(at_home(chain, t, False) for t in chain.tensors())
        candidate = Candidate(options=options, schedules=schedules, source="test", copy_turns=turns)
        plan = assemble(chain, candidate, slices=slices, clip=False)
        back, free = ({item: n for n, items in at.items() for item, _ in items} for at in activation_turns(plan, chain))
        assert len(back) == len(free) == layers * slices
        for item, released in free.items():
            block, k = (int(part) for part in item.partition(":")[2].split("."))
            forward, backward = block * slices + k, (2 * (layers + 1) - block) * slices + k
            assert forward < released < back[item] <= backward
            assert back[item] < backward or backward - forward == 2, "the copy back has a turn wherever there is one"
            assert min(turns, (backward - forward) // 2) == released - forward
        verify(compile_program(plan, chain), chain)
