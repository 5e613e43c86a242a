"""Which states on disk may trail their weight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.candidate.candidate import Side
from planner.candidate.evaluate import evaluate, proven
from planner.candidate.trailing import trailing_bytes, ways_to_trail
from planner.schedule.simulate import simulate
from tests.planner.search.test_states_on_disk import MACHINE, compile_program, streaming


def trailing(candidate):
    return [j.tensor.name for j in candidate.schedules if j.trails]


@pytest.fixture(scope="module")
def made():
    return streaming(clip=True, masters=True, layers=6)


def ways(made, *, host_bytes=10**9, rounds=1):
    setting, candidate = made
    return list(ways_to_trail(setting.chain, candidate, rounds=rounds, host_bytes=host_bytes))


def test_none_to_all_of_them_trail_those_of_the_first_blocks_first_and_never_the_heads(made):
    _, candidate = made
    on_cpu = [j.tensor.name for j in candidate.schedules if j.side is Side.CPU]
    found = [trailing(way) for way in ways(made)]
    assert found[0] == [] and sorted(found[-1]) == sorted(set(on_cpu) - {"h"}) and "h" in on_cpu
    assert [len(each) for each in found] == sorted({len(each) for each in found}) and len(found) == 7
    first = {name[:2] for name in found[1]}
    assert "l0" in first and "l5" not in first


def test_they_trail_as_far_as_the_host_has_room_for_their_gradients_and_in_rounds_it_has_them_anyway(made):
    setting = made[0]
    sizes = {t.name: trailing_bytes(t, 1) for t in setting.chain.tensors()}
    assert all(size > 0 for name, size in sizes.items() if name != "e")
    room = sizes["l0.b"] + sizes["l1.a"]
    most = max((trailing(way) for way in ways(made, host_bytes=room)), key=len)
    assert 0 < sum(sizes[name] for name in most) <= room
    some = next(way for way in ways(made) if trailing(way))
    kept = ways((setting, some), host_bytes=0)  # what trails now has its room
    assert {len(trailing(way)) for way in kept} >= {0, len(trailing(some))}
    assert len(trailing(ways(made, host_bytes=0, rounds=2)[-1])) > 5
    assert ways(made, host_bytes=0) == []


def test_without_a_master_or_a_disk_nothing_trails():
    assert ways(streaming(clip=True, masters=False)) == []
    setting, candidate = streaming(clip=True, masters=True)
    in_memory = tuple(replace(j, tensor=replace(j.tensor, states_on_disk=False)) for j in candidate.schedules)
    assert ways((setting, replace(candidate, schedules=in_memory))) == []


def test_each_way_is_right_and_takes_what_the_simulator_says_and_the_best_is_faster(made):
    setting, candidate = replace(made[0], hardware=MACHINE), made[1]
    found = [evaluate(setting, way) for way in ways(made)]
    for seen in found:
        plan = proven(seen.candidate, setting)
        assert plan.trailing() == set(trailing(seen.candidate)) and plan.step_s == seen.step_s
        program = compile_program(plan, setting.chain)
        assert seen.step_s == pytest.approx(simulate(program, setting.chain, setting.hardware).step_s, rel=1e-12)
    assert min(seen.step_s for seen in found) < 0.97 * evaluate(setting, candidate).step_s
