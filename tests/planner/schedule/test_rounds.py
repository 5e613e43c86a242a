"""Rounds: a step goes through the chain several times; weights travel once a round, gradients add up across rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from planner.schedule.compile import Op, OpKind, Queue, compile_program
from planner.schedule.memory_use import cpu_parts, gpu_peak_bytes, gpu_usage
from planner.schedule.simulate import simulate
from planner.schedule.verify import InvalidProgram, verify
from tests.support.chains import HARDWARE, chain, mixed_plan, plan, resident_plan, rounds_plan, without_a_wait

PLANS = {
    "resident, 3 rounds": resident_plan(chain(), rounds=3),
    "resident, 2 rounds of 2, clipped": resident_plan(chain(), rounds=2, slices=2, clip=True),
    "mixed, 3 rounds": rounds_plan(3, 1),
    "mixed, 2 rounds of 2": rounds_plan(),
    "all offloaded": rounds_plan(options="keep offload offload keep"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_right_program_of_rounds_is_accepted(name):
    program = compile_program(PLANS[name], chain())
    verify(program, chain())
    assert [Op.parse(str(op)) for op in program.ops] == list(program.ops)


@pytest.mark.parametrize("name", PLANS)
def test_every_wait_of_rounds_is_needed(name):
    program = compile_program(PLANS[name], chain())
    for damaged in without_a_wait(program):
        with pytest.raises(InvalidProgram, match="nothing orders them"):
            verify(damaged, chain())


def test_a_tied_tensor_is_updated_after_its_last_round():
    tied = chain(tied=True)
    program = compile_program(resident_plan(tied, rounds=2, slices=2), tied)
    verify(program, tied)
    updates = [(op.round, op.stage) for op in program.ops if op.kind is OpKind.UPDATE and "e" in op.names]
    assert updates == [(1, "B0")]


def counts(program, kind):
    return Counter(op.subject for op in program.ops if op.kind is kind)


def test_weights_travel_once_a_round_and_what_belongs_to_the_update_once_a_step():
    one, three = (compile_program(a_plan, chain()) for a_plan in (mixed_plan(2), rounds_plan(3, 2)))
    weights = {item: n for item, n in counts(one, OpKind.FETCH).items() if item[0] == "w"}
    assert {item: n for item, n in counts(three, OpKind.FETCH).items() if item[0] == "w"} == {
        item: 3 * n for item, n in weights.items()
    }
    for kind in (OpKind.FETCH, OpKind.SEND):
        assert {i: n for i, n in counts(one, kind).items() if i[0] == "s"} == {"s:l1.b": 1}
        assert {i: n for i, n in counts(three, kind).items() if i[0] == "s"} == {"s:l1.b": 1}
    assert counts(three, OpKind.SEND)["w:l1.b"] == 1
    assert counts(three, OpKind.UPDATE) == counts(one, OpKind.UPDATE)
    assert counts(three, OpKind.CPU_UPDATE) == counts(one, OpKind.CPU_UPDATE)


def test_a_gradient_that_leaves_comes_back_for_the_next_round():
    program = compile_program(rounds_plan(3, 1), chain())
    gradients = [str(op).split()[0] for op in program.ops if op.subject == "g:l1.b" and op.kind is not OpKind.ALLOC]
    assert gradients == [
        "send@B2:g:l1.b",
        "free@B2:g:l1.b",
        "fetch@H3/1:g:l1.b",
        "send@B2/1:g:l1.b",
        "free@B2/1:g:l1.b",
        "fetch@H3/2:g:l1.b",
        "free@B2/2:g:l1.b",  # the device updates from it
    ]
    assert counts(program, OpKind.SEND)["g:l1.a"] == 3
    assert counts(program, OpKind.FETCH)["g:l1.a"] == 2


def test_a_carried_update_runs_in_the_first_round():
    program = compile_program(rounds_plan(2, 1), chain())
    assert [op.name for op in program.queue(Queue.CPU)] == ["cpu_update@F0:l1.a", "cpu_update@B0/1:l0.b"]
    assert [op.carried for op in program.queue(Queue.CPU)] == [True, False]


def damage(**stages):
    a_plan = rounds_plan()
    text = {s.name: str(s) for s in a_plan.stages}
    for name, (old, new) in stages.items():
        assert old in text[name]
        text[name] = text[name].replace(old, new).strip()
    lines = "\n".join(line for line in text.values() if " " in line)
    options, resident = " ".join(a_plan.options), " ".join(a_plan.resident)
    return plan(lines, options=options, resident=resident, slices=2, rounds=2)


DAMAGE = {
    "a gradient that does not come back": (damage(H3=(",g:l1.a", "")), "sum of l1.a's gradients so far is not"),
    "a gradient fetched over the sum": (damage(H3=("g:l1.a", "g:l1.a,g:h")), "g:h is on the device already"),
    "a gradient that leaves and is not sent for the device": (damage(B2=(" offload=g:l1.b", "")), "already"),
    "a gradient that leaves and is not sent": (damage(B1=(",g:l0.b evict", " evict")), "drops a gradient"),
    "an update before its gradient is sent": (
        damage(F0=(" cpu=l1.a", ""), B2=("gpu=l1.b", "gpu=l1.b cpu=l1.a")),
        "the gradient of l1.a is not on the host",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_to_rounds_is_rejected(name):
    damaged, message = DAMAGE[name]
    with pytest.raises(InvalidProgram, match=message):
        verify(compile_program(damaged, chain()), chain())


def test_a_gradient_may_come_back_in_the_very_stage_that_adds_to_it():
    late = damage(H3=(",g:l1.a", ""), B2=(",g:l0.b", ",g:l0.b,g:l1.a"))
    verify(compile_program(late, chain()), chain())


def test_a_missing_round_is_rejected():
    program = compile_program(rounds_plan(), chain())
    ops = tuple(op for op in program.ops if op.round == 0)
    with pytest.raises(InvalidProgram, match="turns are"):
        verify(replace(program, ops=ops), chain())


def test_rounds_hold_fewer_slices_and_gradients_in_between():
    a_chain = chain()
    peaks = [
        gpu_peak_bytes(compile_program(resident_plan(a_chain, rounds=r, slices=8 // r), a_chain), a_chain)
        for r in (1, 2, 4, 8)
    ]
    assert peaks == sorted(peaks, reverse=True)
    program = compile_program(resident_plan(a_chain, rounds=2, slices=2), a_chain)
    after = {(u.op.round, u.op.subject): u.after_bytes for u in gpu_usage(program, a_chain)}
    # The sums of all gradients but the head's, which a plan in one round would not have yet, and two losses.
    gradients = 4 * (100 + 2 * 300)
    assert after[1, "F2.1"] - after[0, "F2.1"] == gradients + 4 * 100 + 2 * 4


def test_the_host_holds_the_offloaded_activations_of_one_round_and_all_gradients_that_travel():
    parts = cpu_parts(rounds_plan(2, 2), chain())
    assert parts.offloaded_bytes == 2 * 500
    assert parts.gradients_bytes == 4 * (200 + 100 + 200)  # l0.b, l1.a, and between the rounds l1.b
    assert cpu_parts(mixed_plan(2), chain()).gradients_bytes == 4 * (200 + 100)


def test_a_resident_plan_of_rounds_takes_the_sum_of_its_computation():
    timeline = simulate(compile_program(resident_plan(chain(), rounds=3), chain()), chain(), HARDWARE)
    assert timeline.step_s == pytest.approx(3 * (0.2 + 2 * 3 + 1.0) + 801 / 10000)
