"""Programs: what a plan becomes."""

from __future__ import annotations

import pytest

from planner.schedule.compile import Op, OpKind, Queue, compile_program
from planner.schedule.plan import Stage
from tests.support.chains import chain, mixed_plan, plan, resident_plan


def ops(program, queue):
    return [str(op) for op in program.queue(queue)]


def test_a_stage_is_what_its_text_says():
    text = "B3 prefetch=w:a,s:b offload=g:c evict=w:c,g:c cpu=c gpu=d"
    assert str(Stage.parse(text)) == text


@pytest.mark.parametrize("text", ["B3 fetch=w:a", "B3 prefetch=", "X3", "B"])
def test_text_that_is_no_stage_is_refused(text):
    with pytest.raises(ValueError):
        Stage.parse(text)


def test_an_operation_is_what_its_text_says():
    for op in compile_program(mixed_plan(2), chain()).ops:
        assert Op.parse(str(op)) == op


def test_a_resident_plan_copies_nothing_and_waits_for_nothing():
    program = compile_program(resident_plan(chain()), chain())
    assert {op.queue for op in program.ops} == {Queue.COMPUTE}
    assert all(not op.waits for op in program.ops)


def test_compute_may_not_start_before_its_weights_arrive():
    program = compile_program(mixed_plan(), chain())
    run = next(op for op in program.ops if op.subject == "F1.0")
    assert run.waits == ("fetch@F0:w:l0.b",)


def test_a_prefetch_waits_for_the_update_of_the_step_before():
    program = compile_program(mixed_plan(), chain())
    fetch = next(op for op in program.ops if op.name == "fetch@F0:w:l0.b")
    names = [op.name for op in program.ops]
    assert "cpu_update@B0:l0.b" in fetch.waits
    assert names.index("cpu_update@B0:l0.b") > names.index(fetch.name)


def test_an_update_that_overlaps_the_next_forward_is_carried():
    program = compile_program(mixed_plan(), chain())
    carried = {op.subject: op.carried for op in program.queue(Queue.CPU)}
    assert carried == {"l1.a": True, "l0.b": False}


def test_the_whole_program_of_a_mixed_plan():
    program = compile_program(mixed_plan(), chain())
    assert ops(program, Queue.H2D) == [
        "fetch@F0:w:l0.b 800B after cpu_update@B0:l0.b alloc@F0:w:l0.b",
        "fetch@F1:w:l1.a 400B after cpu_update@F0:l1.a alloc@F1:w:l1.b",
        "fetch@F1:w:l1.b 800B",
        "fetch@H3:w:l1.a 400B after alloc@H3:w:l1.a",
        "fetch@B2:w:l0.b 800B after alloc@B2:s:l1.b",
        "fetch@B2:s:l1.b 1600B",
        "fetch@B2:a:2.0 500B after alloc@B2:a:2.0",
    ]
    assert ops(program, Queue.D2H) == [
        "send@F2:a:2.0 500B after run@F2:F2.0",
        "send@B1:w:l1.b 800B after update@B2:l1.b",
        "send@B1:s:l1.b 1600B",
        "send@B1:g:l1.a 400B",
        "send@B1:g:l0.b 800B after run@B1:B1.0",
    ]
    assert ops(program, Queue.CPU) == [
        "cpu_update@F0:l1.a 0B carried",  # behind l0.b of the step before, whose gradient was sent later
        "cpu_update@B0:l0.b 0B after send@B1:g:l0.b",
    ]


def test_what_is_allocated_or_released_together_is_waited_for_as_one():
    program = compile_program(mixed_plan(), chain())
    order = [op.name for op in program.ops if op.place == "F1" and op.kind in (OpKind.ALLOC, OpKind.FETCH)]
    assert order == ["alloc@F1:w:l1.a", "alloc@F1:w:l1.b", "fetch@F1:w:l1.a", "fetch@F1:w:l1.b"]
    released = [op for op in program.ops if op.place == "B1" and op.kind is OpKind.FREE]
    assert [op.waits for op in released] == [("send@B1:g:l0.b",), (), (), (), ()]


def test_tensors_that_travel_are_updated_one_by_one_in_order_of_arrival_and_after_those_that_stay():
    both = plan(
        """
        H3 gpu=h evict=g:h
        B2 prefetch=s:l1.b,s:l1.a offload=s:l1.b,s:l1.a gpu=l1.a,l1.b evict=g:l1.a,g:l1.b,s:l1.b,s:l1.a
        B1 gpu=l0.a,l0.b evict=g:l0.a,g:l0.b
        B0 gpu=e evict=g:e
        """,
        options="keep keep keep keep",
        resident="w:e s:e w:h s:h w:l0.a s:l0.a w:l0.b s:l0.b w:l1.a w:l1.b",
    )
    program = compile_program(both, chain())
    assert [str(op) for op in program.ops if op.kind is OpKind.UPDATE and op.stage in ("B2", "B1")] == [
        "update@B2:l1.b 0B after fetch@B2:s:l1.b",
        "update@B2:l1.a 0B after fetch@B2:s:l1.a",
        "update@B1:l0.a,l0.b 0B",
    ]
    assert ops(program, Queue.D2H) == [
        "send@B2:s:l1.b 1600B after update@B2:l1.b",
        "send@B2:s:l1.a 800B after update@B2:l1.a",
    ]


def test_each_slice_has_a_turn_and_weights_travel_once_for_all():
    program = compile_program(mixed_plan(3), chain())
    turns = [op.subject for op in program.ops if op.kind is OpKind.RUN]
    assert turns[:6] == ["F0.0", "F0.1", "F0.2", "F1.0", "F1.1", "F1.2"]
    one = [op.name for op in compile_program(mixed_plan(1), chain()).queue(Queue.H2D) if ":w:" in op.name]
    assert [op.name for op in program.queue(Queue.H2D) if ":w:" in op.name] == one


def test_offloaded_activations_hide_behind_one_turn_each_way():
    program = compile_program(mixed_plan(2), chain())
    compute = [op.name for op in program.queue(Queue.COMPUTE) if "a:2." in op.name or op.kind is OpKind.RUN]
    forward = compute.index("run@F2:F2.0")
    assert compute[forward : forward + 9] == [
        "run@F2:F2.0",
        "run@F2:F2.1",
        "free@F2:a:2.0",
        "run@H3:H3.0",
        "free@H3:a:2.1",
        "alloc@H3:a:2.0",
        "run@H3:H3.1",
        "alloc@B2:a:2.1",
        "run@B2:B2.0",
    ]


def test_with_clipping_every_update_comes_after_the_norm():
    program = compile_program(resident_plan(chain(), clip=True), chain())
    kinds = [op.kind for op in program.ops]
    assert (
        kinds.index(OpKind.UPDATE)
        > kinds.index(OpKind.CLIP)
        > max(n for n, kind in enumerate(kinds) if kind is OpKind.NORM)
    )


def test_what_the_chain_does_not_have_cannot_be_moved():
    with pytest.raises(ValueError, match="w:nothing"):
        compile_program(plan("F0 prefetch=w:nothing", options="keep keep keep keep"), chain())


def test_a_plan_of_another_chain_is_refused():
    with pytest.raises(ValueError, match="4 blocks, the chain 5"):
        compile_program(mixed_plan(), chain(3))
