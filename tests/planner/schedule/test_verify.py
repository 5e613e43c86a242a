"""Verify accepts right programs and rejects each kind of damage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.schedule.compile import OpKind, compile_program
from planner.schedule.memory_use import cpu_peak_bytes, gpu_peak_bytes, gpu_usage
from planner.schedule.simulate import simulate
from planner.schedule.verify import InvalidProgram, verify
from tests.support.chains import (
    HARDWARE,
    chain,
    mixed_plan,
    plan,
    resident_plan,
    rounds_plan,
    with_masters,
    without_a_wait,
)

PLANS = {
    "resident": resident_plan(chain()),
    "resident, clipped, 3 slices": resident_plan(chain(), slices=3, clip=True),
    "mixed": mixed_plan(),
    "mixed, 3 slices": mixed_plan(3),
    "all offloaded": mixed_plan(2, options="keep offload offload keep"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_right_program_is_accepted(name):
    verify(compile_program(PLANS[name], chain()), chain())


def test_a_tied_tensor_is_updated_after_both_its_blocks():
    tied = chain(tied=True)
    verify(compile_program(resident_plan(tied, slices=2), tied), tied)


@pytest.mark.parametrize("name", PLANS)
def test_every_wait_is_needed(name):
    program = compile_program(PLANS[name], chain())
    assert any(op.waits for op in program.ops) or name.startswith("resident")
    for damaged in without_a_wait(program):
        with pytest.raises(InvalidProgram, match="nothing orders them"):
            verify(damaged, chain())


def damage(**stages: tuple[str, str]):
    """The mixed plan with text replaced in some stages."""
    a_plan = mixed_plan()
    text = {s.name: str(s) for s in a_plan.stages}
    for name, (old, new) in stages.items():
        assert old in text[name]
        text[name] = text[name].replace(old, new).strip()
    lines = "\n".join(line for line in text.values() if " " in line)
    return plan(lines, options="keep recompute offload keep", resident=" ".join(a_plan.resident))


DAMAGE = {
    "a dropped prefetch": (damage(F0=(" prefetch=w:l0.b", "")), "is not on the device"),
    "a prefetch of what is there": (damage(F0=("w:l0.b", "w:l0.b,w:h")), "on the device already"),
    "an early evict": (
        damage(F0=("prefetch=w:l0.b", "prefetch=w:l0.b evict=w:l0.b"), F1=(" evict=w:l0.b", "")),
        "is not on the device",
    ),
    "a forgotten evict": (damage(F2=(" evict=w:l1.a", "")), "on the device already"),
    "a doubled GPU update": (damage(H3=("gpu=h", "gpu=h,h")), "updated 2 times"),
    "an update on both sides": (damage(B2=("gpu=l1.b", "gpu=l1.b,l1.a")), "s:l1.a, which is not on the device"),
    "a missing update": (damage(H3=("gpu=h", "gpu=e")), "not complete"),
    "no update at all": (damage(B0=(" gpu=e", "")), "drops a gradient"),
    "a gradient not sent": (damage(B1=("g:l1.a,g:l0.b evict", "g:l0.b evict")), "drops a gradient"),
    "a gradient kept": (damage(H3=(" evict=g:h", "")), "on the device at one end"),
    "states not brought": (damage(B2=(",s:l1.b", "")), "is not on the device"),
    "stale weights fetched": (damage(B1=("offload=w:l1.b,", "offload=")), "copy of w:l1.b is not current"),
    "an update after the prefetch": (
        damage(F0=(" cpu=l1.a", ""), F1=("evict=w:l0.b", "evict=w:l0.b cpu=l1.a")),
        "is not current|stale",
    ),
    "an update with the weight still there": (damage(B2=("evict=w:l1.a,", "evict=")), "does not close"),
    "an update before its gradient": (
        damage(B0=("cpu=l0.b ", ""), B1=(" gpu=l0.a", " cpu=l0.b gpu=l0.a,l0.b")),
        "not on the device|already|stale|updated",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_rejected(name):
    damaged, message = DAMAGE[name]
    with pytest.raises(InvalidProgram, match=message):
        verify(compile_program(damaged, chain()), chain())


def test_a_carried_update_of_a_weight_that_is_there_when_a_step_begins_is_rejected():
    # In the steady state this is right; a drain would update the host's copy while the device's is still there.
    lines = """
    F0 cpu=l1.a evict=w:l1.a
    F1 prefetch=w:l1.a
    H3 gpu=h evict=g:h
    B2 gpu=l1.b evict=g:l1.b
    B1 offload=g:l1.a evict=g:l1.a gpu=l0.a,l0.b
    B0 gpu=e evict=g:l0.a,g:l0.b,g:e
    """
    resident = "w:e s:e w:h s:h w:l0.a s:l0.a w:l0.b s:l0.b w:l1.b s:l1.b w:l1.a"
    odd = plan(lines, options="keep keep keep keep", resident=resident)
    with pytest.raises(InvalidProgram, match="stale"):
        verify(compile_program(odd, chain()), chain())


@pytest.mark.parametrize("cpu", ["F0", "B2", "B1"])
def test_an_update_left_to_the_next_step_comes_before_the_weight_is_used_again(cpu):
    lines = {
        "F1": "prefetch=w:h",
        "H3": "evict=w:h",
        "B2": "gpu=l1.a,l1.b evict=g:l1.a,g:l1.b",
        "B1": "gpu=l0.a,l0.b evict=g:l0.a,g:l0.b",
        "B0": "offload=g:h gpu=e evict=g:h,g:e",
    }
    lines[cpu] = f"{lines.get(cpu, '')} cpu=h"
    there = " ".join(f"{kind}:{name}" for name in ("e", "l0.a", "l0.b", "l1.a", "l1.b") for kind in "ws")
    text = "\n".join(f"{stage} {line}" for stage, line in lines.items())
    program = compile_program(plan(text, options="keep keep keep keep", resident=there), chain())
    if cpu == "F0":
        verify(program, chain())
    else:
        with pytest.raises(InvalidProgram, match="the update of h that the step before left is not done"):
            verify(program, chain())


def test_a_norm_of_a_gradient_that_is_gone_is_rejected():
    lines = """
    F0 prefetch=w:l0.b
    B1 offload=g:l0.b evict=g:l0.b,w:l0.b
    B0 cpu=l0.b gpu=e,h,l0.a,l1.a,l1.b evict=g:e,g:h,g:l0.a,g:l1.a,g:l1.b
    """
    there = " ".join(f"{kind}:{name}" for name in ("e", "h", "l0.a", "l1.a", "l1.b") for kind in "ws")
    program = compile_program(plan(lines, options="keep keep keep keep", resident=there, clip=True), chain())
    verify(program, chain())
    ops = list(program.ops)
    names = [op.name for op in ops]
    ops.insert(names.index("free@B1:g:l0.b"), ops.pop(names.index("norm@B1:l0.a,l0.b")))
    with pytest.raises(InvalidProgram, match=r"g:l0\.b, which is not on the device"):
        verify(replace(program, ops=tuple(ops)), chain())


def test_a_gradient_takes_its_weights_place_on_the_host_where_the_update_has_a_master():
    # l0.b and l1.a: 14 bytes per element (updated by the CPU); l1.b: 14; activations of the last layer: 500.
    narrow = with_masters(chain())
    verify(compile_program(mixed_plan(), narrow), narrow)
    assert cpu_peak_bytes(mixed_plan(), narrow) == 14 * 300 + 14 * 200 + 500
    assert cpu_peak_bytes(rounds_plan(), narrow) == 14 * 500 + 2 * 500 + 2 * 500


def test_where_states_are_packed_the_host_has_fourteen_bytes_a_parameter_in_rounds_too():
    # Of rounds_plan, l0.b and l1.a are the CPU's; the gradient of l1.b comes and goes, its states are the device's.
    narrow = replace(with_masters(chain()), packs=True)
    assert cpu_peak_bytes(mixed_plan(), narrow) == 14 * 300 + 14 * 200 + 500
    assert cpu_peak_bytes(rounds_plan(), narrow) == 14 * 300 + 16 * 200 + 2 * 500
    assert cpu_peak_bytes(rounds_plan(), replace(chain(), packs=True)) == cpu_peak_bytes(rounds_plan(), chain())


def test_a_weight_may_not_be_fetched_when_its_gradient_is_in_its_place():
    late = damage(B0=("evict=g:e", "prefetch=w:l1.a evict=w:l1.a,g:e"))
    verify(compile_program(late, chain()), chain())
    narrow = with_masters(chain())
    with pytest.raises(InvalidProgram, match=r"host.s copy of w:l1\.a is not current"):
        verify(compile_program(late, narrow), narrow)


def test_a_missing_turn_is_rejected():
    program = compile_program(mixed_plan(), chain())
    ops = tuple(op for op in program.ops if op.subject != "B1.0")
    with pytest.raises(InvalidProgram, match="turns are"):
        verify(replace(program, ops=ops), chain())


def test_an_operation_that_stands_twice_is_rejected():
    program = compile_program(mixed_plan(), chain())
    with pytest.raises(InvalidProgram, match="stands twice"):
        verify(replace(program, ops=(*program.ops, program.ops[0])), chain())


def test_a_peak_one_byte_over_the_budget_is_rejected():
    program = compile_program(mixed_plan(), chain())
    peak = gpu_peak_bytes(program, chain())
    verify(program, chain(), gpu_budget_bytes=peak)
    with pytest.raises(InvalidProgram, match=f"the peak is {peak} bytes, the budget {peak - 1}"):
        verify(program, chain(), gpu_budget_bytes=peak - 1)


def test_memory_of_a_resident_plan_by_hand():
    a_chain = chain()
    usage = {u.op.subject: u for u in gpu_usage(compile_program(resident_plan(a_chain), a_chain), a_chain)}
    base = 800 * 12 + 10  # five tensors of 800 elements in all, 4 + 8 bytes each, and the frame
    assert usage["F0.0"].after_bytes == base + 50  # the embedding's output waits for layer 0
    assert usage["F1.0"].after_bytes == base + 1000 + 50 + 50  # saved, its input, its output
    assert usage["F1.0"].peak_bytes == base + 50 + 1050
    assert usage["H3.0"].peak_bytes == base + 2 * 1050 + 700
    assert usage["H3.0"].after_bytes == base + 2 * 1050 + 400 + 50  # the head's gradient; one for layer 1 waits
    assert usage["B2.0"].peak_bytes == base + 2 * 1050 + 50 + (100 + 1200)


def test_slices_that_wait_hold_what_their_frames_hold():
    a_chain = chain()
    usage = {u.op.subject: u for u in gpu_usage(compile_program(resident_plan(a_chain, slices=3), a_chain), a_chain)}
    base = 800 * 12 + 10
    assert usage["F0.2"].after_bytes == base + 3 * 50
    assert usage["F1.0"].after_bytes == base + 1050 + 3 * 50


def test_host_memory_counts_what_has_a_host_copy():
    # l0.b and l1.a: 12 + 4 bytes per element (updated by the CPU); l1.b: 12; activations of the last layer: 500.
    assert cpu_peak_bytes(mixed_plan(), chain()) == 16 * 300 + 12 * 200 + 500


def test_a_resident_plan_takes_the_sum_of_its_computation():
    timeline = simulate(compile_program(resident_plan(chain()), chain()), chain(), HARDWARE)
    assert timeline.step_s == pytest.approx(0.2 + 2 * 3 + 1.0 + 801 / 10000)


def test_an_exposed_transfer_makes_the_step_longer():
    a_chain = chain()
    timeline = simulate(compile_program(mixed_plan(), a_chain), a_chain, HARDWARE)
    assert timeline.step_s > dict(timeline.busy_s)[next(q for q, _ in timeline.busy_s)]
    starts = {span.op.name: span.start_s for span in timeline.spans}
    ends = {span.op.name: span.end_s for span in timeline.spans}
    for span in timeline.spans:
        assert span.end_s >= span.start_s
    assert starts["run@F1:F1.0"] >= ends["fetch@F0:w:l0.b"]
    assert {s.op.kind for s in timeline.spans} >= {OpKind.RUN, OpKind.FETCH, OpKind.SEND, OpKind.CPU_UPDATE}
