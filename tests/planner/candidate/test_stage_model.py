"""The stage model has the simulator's clock, to the last bit, and knows the room of its candidate wherever that
moves."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.candidate.candidate import Candidate, assemble
from planner.candidate.evaluate import evaluate
from planner.candidate.setting import Budgets, Setting
from planner.candidate.stage_model import StageModel
from planner.candidate.update_ahead import ahead_of_norm
from planner.greedy.streaming import PROFILES, profile, streamed
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.simulate import simulate
from planner.schedule.verify import verify
from planner.search.improve import Decisions
from planner.search.moves import Board, Place
from tests.support.random_chains import chains, machines

PLENTY = 10**9


def setting_of(chain: Chain, hardware: Hardware, slices: int, rounds: int, clip: bool) -> Setting:
    budgets = Budgets(gpu_bytes=PLENTY, cpu_bytes=PLENTY)
    return Setting(chain=chain, hardware=hardware, budgets=budgets, slices=slices, rounds=rounds, clip=clip)


def simulated_s(setting: Setting, candidate: Candidate) -> float:
    plan = assemble(setting.chain, candidate, slices=setting.slices, rounds=setting.rounds, clip=setting.clip)
    program = compile_program(plan, setting.chain)
    verify(program, setting.chain)
    return simulate(program, setting.chain, setting.hardware).step_s


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chain=chains(),
    hardware=machines(),
    slices=st.sampled_from((1, 3)),
    rounds=st.sampled_from((1, 2, 3)),
    clip=st.booleans(),
    ahead=st.booleans(),
    before_norm=st.booleans(),
    shared=st.sampled_from((0.0, 0.5)),
    on_gpu=st.booleans(),
    options=st.sampled_from(PROFILES),
)
def test_a_step_takes_what_the_simulator_says(
    chain: Chain,
    hardware: Hardware,
    slices: int,
    rounds: int,
    clip: bool,
    ahead: bool,
    before_norm: bool,
    shared: float,
    on_gpu: bool,
    options: str,
) -> None:
    setting = setting_of(chain, replace(hardware, shared_compute=shared), slices, rounds, clip)
    names = frozenset(t.name for n, t in enumerate(chain.tensors()) if n % 2 and on_gpu)
    candidate = streamed(setting, profile(setting, options), ahead=ahead, gpu_updated=names, source="test")
    if before_norm and clip:
        *_, candidate = (candidate, *ahead_of_norm(chain, candidate, rounds=rounds, host_bytes=PLENTY))
    assert StageModel(setting, candidate).step_s() == simulated_s(setting, candidate)


def shifted(board: Board, chance: random.Random) -> list[tuple[int, Place]]:
    """A few absences with one of their stages elsewhere, allowed or not."""
    found = []
    for n in chance.choices(range(len(board.windows)), k=5):
        what = chance.choice(("sent", "evict", "fetch", "update"))
        far = getattr(board.places[n], what) + chance.choice((-2, -1, 1, 2))
        found.append((n, replace(board.places[n], **{what: far})))
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chain=chains(),
    hardware=machines(),
    slices=st.sampled_from((1, 3)),
    clip=st.booleans(),
    shared=st.sampled_from((0.0, 0.5)),
    options=st.sampled_from(PROFILES),
    seed=st.integers(0, 1000),
)
def test_moved_stages_are_simulated_to_the_last_bit_and_leave_the_room_that_is_left(
    chain: Chain, hardware: Hardware, slices: int, clip: bool, shared: float, options: str, seed: int
) -> None:
    setting = setting_of(chain, replace(hardware, shared_compute=shared), slices, 1, clip)
    chance, decisions = random.Random(seed), Decisions(setting)
    assume(decisions)
    candidate = streamed(setting, profile(setting, options), ahead=True, source="test")
    for _ in range(3 * (not clip)):  # with clipping what the device updates may not leave
        candidate = decisions.changed(candidate, chance)
    board = Board(setting, evaluate(setting, candidate))
    assume(board.windows)
    for _ in range(4):
        for n, place in shifted(board, chance):
            board.put_if_room(n, place)
        moved = board.proposed()
        assert board.step_s() == simulated_s(setting, moved)
        assert board.room == evaluate(setting, moved).room_bytes


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), hardware=machines(), clip=st.booleans(), seed=st.integers(0, 1000))
def test_in_rounds_weights_move_and_the_room_that_is_left_is_never_overestimated(
    chain: Chain, hardware: Hardware, clip: bool, seed: int
) -> None:
    setting, chance = setting_of(chain, hardware, 2, 2, clip), random.Random(seed)
    candidate = streamed(setting, profile(setting, "offload"), ahead=True, source="test")
    board = Board(setting, evaluate(setting, candidate))
    weights = [n for n, window in enumerate(board.windows) if window.item.kind == "w"]
    assume(weights)
    for n, place in shifted(board, chance):
        if n in weights:
            board.put_if_room(n, place)
    moved = board.proposed()
    assert board.step_s() == simulated_s(setting, moved)
    assert all(ours <= real for ours, real in zip(board.room, evaluate(setting, moved).room_bytes, strict=True))
