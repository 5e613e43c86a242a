"""Programs in which states on disk trail their weight: what they wait for, and what is wrong with them when damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.schedule.compile import Op, OpKind, Queue, compile_program, with_waits
from planner.schedule.memory_use import cpu_parts
from planner.schedule.plan import Stage
from planner.schedule.simulate import host_traffic_bytes, simulate, written_bytes
from planner.schedule.verify import InvalidProgram, verify
from planner.search.activations_on_disk import with_twins
from tests.support.chains import HARDWARE, chain, plan, with_masters
from tests.support.chaos import Chaos, waits

# l1.a and l0.b are updated by the CPU. The states of the first one trail, those of the other do not.
LINES = """
F0 prefetch=w:l0.b states=l1.a
F1 prefetch=w:l1.a evict=w:l0.b
F2 evict=w:l1.a
H3 prefetch=w:l1.a
B2 prefetch=w:l0.b offload=g:l1.a evict=w:l1.a,g:l1.a
B1 offload=g:l0.b evict=w:l0.b,g:l0.b
B0 cpu=l0.b,l1.a gpu=e,h,l0.a,l1.b evict=g:e,g:h,g:l0.a,g:l1.b
"""
ROUNDS = LINES.replace("B2 prefetch=", "B2 prefetch=g:l1.a,").replace("B1 offload", "B1 prefetch=g:l0.b offload")
THERE = " ".join(f"{kind}:{name}" for name in ("e", "h", "l0.a", "l1.b") for kind in "ws")
SCALE, PIECE = 30, 1024  # three pieces of l1.a, six of l0.b
DRIVE = replace(HARDWARE, disk_read_bytes_per_s=400.0, disk_write_bytes_per_s=100.0, disk_bytes=10**9)
SHAPES = {"one slice": (LINES, {}), "slices": (LINES, {"slices": 3}), "rounds": (ROUNDS, {"rounds": 2})}


def trailing_chain(*, masters=True):
    small = with_masters(chain()) if masters else chain()

    def grown(t):
        sizes = {name: SCALE * getattr(t, name) for name in ("elements", "bytes", "gradient_bytes", "state_bytes")}
        return replace(t, **sizes, states_on_disk=t.name in ("l1.a", "l0.b"))

    blocks = tuple(replace(b, tensors=tuple(map(grown, b.tensors))) for b in small.blocks)
    return replace(small, blocks=blocks, piece_elements=PIECE)


def trailing_plan(lines=LINES, **more):
    return plan(lines, options="keep recompute keep keep", resident=THERE, clip=True, **more)


def compiled(lines=LINES, **more):
    return compile_program(trailing_plan(lines, **more), trailing_chain())


@pytest.mark.parametrize("shape", [*SHAPES, "activations on disk"])
def test_a_program_is_right_and_every_order_computes_the_same_but_without_a_wait(shape):
    lines, more = SHAPES.get(shape, (LINES, {"slices": 2}))
    program, a_chain = compiled(lines, **more), trailing_chain()
    if shape not in SHAPES:
        a_chain = with_twins(a_chain)
        stored = next(o.name for o in a_chain.blocks[1].options if o.on_disk)
        a_plan = replace(trailing_plan(lines, **more), options=("keep", stored, stored, "keep"))
        program = compile_program(a_plan, a_chain)
        assert {op.subject[0] for op in program.queue(Queue.DISK_WRITE)} == {"a", "s"}
    verify(program, a_chain)
    assert [Op.parse(str(op)) for op in program.ops] == list(program.ops)
    assert [Stage.parse(str(stage)) for stage in trailing_plan(lines).stages] == list(trailing_plan(lines).stages)
    chaos, removed = Chaos(program, a_chain), waits(program)
    serial = chaos.serial()
    assert (chaos.random(300, seed=1) == serial).all() and (chaos.steered(seed=2) == serial).all()
    differs = (chaos.without(removed, seed=3) != serial).any((1, 2))
    for wait, seen in zip(removed, differs, strict=True):
        op, on = program.ops[wait.op], program.ops[wait.on]
        assert seen or chaos.is_idle(wait.op) or chaos.is_idle(wait.on), (str(op), str(on))
        less = replace(op, waits=tuple(name for name in op.waits if name != on.name))
        with pytest.raises(InvalidProgram, match="nothing orders them"):
            verify(replace(program, ops=tuple(less if o is op else o for o in program.ops)), a_chain)


def test_the_weight_is_made_behind_the_norm_and_its_states_follow_beside_the_next_forward():
    program = compiled()
    assert [op.name for op in program.queue(Queue.CPU)] == [
        *(f"cpu_states@F0:l1.a#{piece}" for piece in range(3)),
        *(f"cpu_update@B0:l0.b#{piece}" for piece in range(6)),
        *(f"cpu_weight@B0:l1.a#{piece}" for piece in range(3)),
    ]
    assert {op.kind for op in program.ops if op.carried} == {OpKind.READ, OpKind.CPU_STATES, OpKind.WRITE}
    fetch, send = (next(op for op in program.ops if op.name == n) for n in ("fetch@F1:w:l1.a", "send@B2:g:l1.a"))
    assert "cpu_weight@B0:l1.a#2" in fetch.waits and "cpu_states@F0:l1.a#2" in send.waits


def without(*gone):
    """What is left, with waits of its own."""
    program = compiled()
    ops = tuple(op for op in program.ops if op.name not in gone)
    return replace(program, ops=with_waits(ops, trailing_chain(), program.options))


DAMAGE = {
    "states that never follow": (
        lambda: without(
            *(
                f"{kind}@F0:{item}l1.a#{piece}"
                for piece in range(3)
                for kind, item in (("read", "s:"), ("cpu_states", ""), ("write", "s:"))
            )
        ),
        "still need the gradient|a step behind",
    ),
    "states that follow in part": (
        lambda: without("read@F0:s:l1.a#1", "cpu_states@F0:l1.a#1", "write@F0:s:l1.a#1"),
        "still need the gradient",
    ),
    "states that are not written": (lambda: without("write@F0:s:l1.a#1"), "does not hold the piece as it is now"),
    "states that are not read": (lambda: without("read@F0:s:l1.a#1"), "does not hold the piece as it is now"),
    "a weight without its states": (lambda: without("peek@B0:s:l1.a#0"), "does not hold the piece as it is now"),
    "a weight that is not made": (
        lambda: without(*(f"{kind}l1.a#{piece}" for piece in range(3) for kind in ("peek@B0:s:", "cpu_weight@B0:"))),
        "not behind|updated 0 times",
    ),
    "states after the next gradient": (
        lambda: compiled(LINES.replace(" states=l1.a", "").replace("B1 offload", "B1 states=l1.a offload")),
        "still need the gradient",
    ),
    "states twice": (lambda: compiled(LINES.replace("F1 prefetch", "F1 states=l1.a prefetch")), "not behind"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_rejected(name):
    make, text = DAMAGE[name]
    with pytest.raises(InvalidProgram, match=text):
        verify(make(), trailing_chain())


def test_without_a_norm_or_without_a_master_no_states_trail():
    program = compile_program(replace(trailing_plan(), clip=False), trailing_chain())
    with pytest.raises(InvalidProgram):
        verify(program, trailing_chain())
    program = compile_program(trailing_plan(), trailing_chain(masters=False))
    with pytest.raises(InvalidProgram, match=r"nothing lets the states of l1\.a trail"):
        verify(program, trailing_chain(masters=False))


def test_the_host_has_the_gradient_beside_the_weight_whose_states_trail():
    a_chain = trailing_chain()
    waiting = trailing_plan(LINES.replace(" states=l1.a", ""))
    (own,) = (t.gradient_bytes for t in a_chain.tensors() if t.name == "l1.a")
    assert cpu_parts(trailing_plan(), a_chain).gradients_bytes == own
    assert cpu_parts(waiting, a_chain).gradients_bytes == 0
    assert cpu_parts(trailing_plan(), a_chain).total_bytes == cpu_parts(waiting, a_chain).total_bytes + own


def test_the_weights_states_are_read_at_the_drives_rate_and_once_more_to_be_written():
    a_chain = trailing_chain()
    program, waiting = compiled(), compiled(LINES.replace(" states=l1.a", ""))
    (size,) = (sum(p.bytes for p in a_chain.state_pieces(t)) for t in a_chain.tensors() if t.name == "l1.a")
    (elements,) = (t.elements for t in a_chain.tensors() if t.name == "l1.a")
    busy = [dict(simulate(each, a_chain, DRIVE).busy_s) for each in (program, waiting)]
    assert busy[0][Queue.DISK_READ] == pytest.approx(busy[1][Queue.DISK_READ] + size / 400.0)
    assert busy[0][Queue.DISK_WRITE] == busy[1][Queue.DISK_WRITE]
    assert written_bytes(program) == written_bytes(waiting)
    more = host_traffic_bytes(program, a_chain) - host_traffic_bytes(waiting, a_chain)
    assert more == size + 28 * elements
