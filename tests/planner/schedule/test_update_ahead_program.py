"""Programs whose CPU updates run ahead of the norm: what they wait for, and what is wrong with them when damaged."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from planner.machine.traffic import AHEAD_TRAFFIC_BYTES, CLIPPED_SHARE, UPDATE_TRAFFIC_BYTES
from planner.schedule.compile import Op, OpKind, Queue, compile_program
from planner.schedule.memory_use import cpu_parts
from planner.schedule.simulate import host_traffic_bytes, simulate
from planner.schedule.verify import InvalidProgram, verify
from tests.support.chains import HARDWARE, chain, plan, without_a_wait

# The second layer's first tensor is updated ahead of the norm, the first layer's second one waits for it.
LINES = """
F0 prefetch=w:l0.b
F1 prefetch=w:l1.a evict=w:l0.b
F2 evict=w:l1.a
H3 prefetch=w:l1.a
B2 prefetch=w:l0.b offload=g:l1.a evict=w:l1.a,g:l1.a
B1 offload=g:l0.b cpu=l1.a evict=w:l0.b,g:l0.b
B0 cpu=l0.b gpu=e,h,l0.a,l1.b evict=g:e,g:h,g:l0.a,g:l1.b
"""
THERE = " ".join(f"{kind}:{name}" for name in ("e", "h", "l0.a", "l1.b") for kind in "ws")


def ahead_plan(lines=LINES, **more):
    return plan(lines, options="keep recompute keep keep", resident=THERE, clip=True, **more)


@pytest.mark.parametrize("slices", [1, 3])
def test_a_program_with_updates_ahead_is_right_and_every_wait_is_needed(slices):
    program = compile_program(ahead_plan(slices=slices), chain())
    verify(program, chain())
    assert [Op.parse(str(op)) for op in program.ops] == list(program.ops)
    for damaged in without_a_wait(program):
        with pytest.raises(InvalidProgram, match="nothing orders them"):
            verify(damaged, chain())


def test_the_update_runs_beside_the_backward_and_the_replay_behind_the_norm():
    program = compile_program(ahead_plan(), chain())
    assert [str(op) for op in program.queue(Queue.CPU)] == [
        "cpu_ahead@B1:l1.a 0B after send@B2:g:l1.a",
        "cpu_update@B0:l0.b 0B after clip@B0:all",
        "cpu_replay@B0:l1.a 0B",
    ]
    fetch = next(op for op in program.ops if op.name == "fetch@F1:w:l1.a")
    assert "cpu_replay@B0:l1.a" in fetch.waits


def damaged(*changes):
    lines = LINES
    for old, new in changes:
        assert old in lines
        lines = lines.replace(old, new)
    return compile_program(ahead_plan(lines), chain())


def without(kind):
    program = compile_program(ahead_plan(), chain())
    return replace(program, ops=tuple(op for op in program.ops if op.kind is not kind))


DAMAGE = {
    "a fetch before the norm": (damaged(("B0 cpu", "B0 prefetch=w:l1.a cpu")), "not final before the norm"),
    "with the weight still there": (
        damaged(("evict=w:l1.a,g:l1.a\nB1", "evict=g:l1.a\nB1"), ("evict=w:l0.b,g", "evict=w:l1.a,w:l0.b,g")),
        "stale",
    ),
    "before its gradient": (
        damaged(("H3 ", "H3 cpu=l1.a "), ("cpu=l1.a evict=w:l0", "evict=w:l0")),
        "l1.a was not updated ahead",
    ),
    "twice": (damaged(("B0 cpu=l0.b", "B0 cpu=l0.b,l1.a")), "l1.a is updated 2 times a step"),
    "without its replay": (without(OpKind.CPU_REPLAY), "waits for what is not in the program: cpu_replay"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_rejected(name):
    program, message = DAMAGE[name]
    with pytest.raises(InvalidProgram, match=re.escape(message)):
        verify(program, chain())


def test_an_update_may_run_ahead_in_the_very_stage_that_makes_its_gradient():
    early = damaged(("B2 ", "B2 cpu=l1.a "), ("cpu=l1.a evict=w:l0", "evict=w:l0"))
    verify(early, chain())
    assert [op.stage for op in early.ops if op.kind is OpKind.CPU_AHEAD] == ["B2"]


def test_a_replay_without_an_update_ahead_is_rejected():
    program = compile_program(ahead_plan(), chain())
    ops = tuple(replace(op, subject="l0.b") if op.kind is OpKind.CPU_REPLAY else op for op in program.ops)
    ops = tuple(replace(op, waits=tuple(w.replace("replay@B0:l1.a", "replay@B0:l0.b") for w in op.waits)) for op in ops)
    with pytest.raises(InvalidProgram, match=r"was not updated ahead|nothing orders"):
        verify(replace(program, ops=ops), chain())


def test_the_host_keeps_what_was_before_an_update_ahead():
    assert cpu_parts(ahead_plan(), chain()).kept_bytes == 12 * 100
    waiting = ahead_plan(LINES.replace("cpu=l1.a ", "").replace("cpu=l0.b", "cpu=l0.b,l1.a"))
    assert cpu_parts(waiting, chain()).kept_bytes == 0


def test_an_update_ahead_writes_elsewhere_and_its_replay_counts_by_the_share_of_clipped_steps():
    program = compile_program(ahead_plan(), chain())
    spans = {span.op.name: span for span in simulate(program, chain(), HARDWARE).spans}
    ahead, replay = spans["cpu_ahead@B1:l1.a"], spans["cpu_replay@B0:l1.a"]
    plain_s = 100 / HARDWARE.cpu_update_parameters_per_s
    assert ahead.end_s - ahead.start_s == pytest.approx(plain_s * AHEAD_TRAFFIC_BYTES / UPDATE_TRAFFIC_BYTES)
    assert replay.end_s - replay.start_s == pytest.approx(CLIPPED_SHARE * (ahead.end_s - ahead.start_s))
    copies = sum(op.bytes for op in program.ops if op.kind in (OpKind.FETCH, OpKind.SEND))
    updates = 200 * UPDATE_TRAFFIC_BYTES + 100 * AHEAD_TRAFFIC_BYTES * (1 + CLIPPED_SHARE)
    assert host_traffic_bytes(program, chain()) == copies + updates
