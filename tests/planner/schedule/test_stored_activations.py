"""Activations that go to disk after their forward and come back for their backward, as operations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.candidate.evaluate import evaluate
from planner.candidate.setting import Budgets, Setting
from planner.greedy.streaming import profile, streamed
from planner.schedule.activation_turns import stored_activations
from planner.schedule.compile import Op, OpKind, Queue, compile_program, with_waits
from planner.schedule.memory_use import cpu_parts, gpu_peak_bytes
from planner.schedule.operations import ACTIVATION_SLOTS
from planner.schedule.simulate import host_traffic_bytes, least_step_s, simulate
from planner.schedule.verify import InvalidProgram, verify
from planner.search.activations_on_disk import with_twins
from tests.support.chains import HARDWARE, chain
from tests.support.chaos import Chaos, waits

_DISK = {Queue.DISK_READ, Queue.DISK_WRITE}
PAGE = 4096
MACHINE = replace(HARDWARE, disk_read_bytes_per_s=4000.0, disk_write_bytes_per_s=2000.0, disk_bytes=10**9)


def streaming(layers: int = 3, *, slices: int = 2, rounds: int = 1, clip: bool = False, stored: object = None):
    """Streamed weights; the activations of all layers, or of those of the numbers `stored`, are on disk."""
    a_chain = with_twins(chain(layers))
    setting = Setting(
        chain=a_chain,
        hardware=MACHINE,
        budgets=Budgets(gpu_bytes=10**9, cpu_bytes=10**9),
        slices=slices,
        clip=clip,
        rounds=rounds,
    )
    names = profile(setting, "offload")
    assert set(names[1:-1]) == {"offload"}
    names = [
        f"{name}-disk" if name == "offload" and (stored is None or i in stored) else name
        for i, name in enumerate(names)
    ]
    return setting, streamed(setting, names, ahead=True, source="streamed")


def program_of(**shape):
    setting, made = streaming(**shape)
    plan = evaluate(setting, made).plan
    return compile_program(plan, setting.chain), setting.chain, plan


def test_each_is_written_once_and_read_once_in_each_round_through_the_slots_in_turn():
    program, a_chain, plan = program_of(slices=2, rounds=2)
    verify(program, a_chain)
    writes, reads = program.queue(Queue.DISK_WRITE), program.queue(Queue.DISK_READ)
    assert [op.subject for op in writes] == 2 * [f"a:{i}.{k}" for i in (1, 2) for k in range(2)]
    assert [op.subject for op in reads] == 2 * [f"a:{i}.{k}" for i in (2, 1) for k in range(2)]
    assert all(op.bytes == PAGE for op in (*reads, *writes))
    assert stored_activations(plan, a_chain) == {op.subject: PAGE for op in writes}
    sent = [op.slot for op in program.ops if op.kind is OpKind.SEND and op.subject[0] == "a" and op.round == 1]
    assert sent == [*range(10, 13), *range(10, 13)]
    stay = [op for op in program.ops if op.subject in ("a:3.0", "a:3.1") and op.kind in (OpKind.SEND, OpKind.FETCH)]
    assert len(stay) == 8 and {(op.subject, op.slot) for op in stay} == {("a:3.0", 11), ("a:3.1", 12)}
    parts = cpu_parts(plan, a_chain)
    assert parts.offloaded_bytes == 0 and parts.activation_ring_bytes == ACTIVATION_SLOTS * 5 * PAGE
    same, other_chain, _ = program_of(slices=2, rounds=2, stored=())
    assert gpu_peak_bytes(program, a_chain) == gpu_peak_bytes(same, other_chain)
    assert all(Op.parse(str(op)) == op for op in program.ops)


def test_where_only_some_are_on_disk_the_others_stay_on_the_host():
    program, a_chain, plan = program_of(layers=4, stored={1, 3})
    verify(program, a_chain)
    assert {op.subject for op in program.queue(Queue.DISK_READ)} == {"a:1.0", "a:1.1"}
    assert cpu_parts(plan, a_chain).offloaded_bytes == 2 * 2 * 500
    assert {op.slot for op in program.ops if op.subject in ("a:2.0", "a:4.1")} == {None}


@pytest.mark.parametrize(("slices", "stay"), [(1, 3), (2, 2), (3, 3), (4, 0), (5, 0)])
def test_what_backward_fetches_first_stays_in_the_ring_as_far_as_a_blocks_slices_have_room(slices, stay):
    program, a_chain, _ = program_of(layers=4, slices=slices)
    verify(program, a_chain)
    assert len(program.queue(Queue.DISK_WRITE)) == 4 * slices - stay
    few, its_chain, _ = program_of(layers=1, slices=1)
    verify(few, its_chain)
    assert not few.queue(Queue.DISK_WRITE) and not few.queue(Queue.DISK_READ)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"slices": 1, "layers": 6},
        {"slices": 3, "rounds": 2},
        {"slices": 4, "rounds": 2},
        {"slices": 1, "rounds": 2, "layers": 5},
        {"clip": True, "stored": {1, 3}},
    ],
    ids=str,
)
def test_every_order_computes_the_same_and_a_missing_wait_is_seen_by_the_proof_and_by_an_order(shape):
    program, a_chain, _ = program_of(**shape)
    verify(program, a_chain)
    chaos = Chaos(program, a_chain)
    serial = chaos.serial()
    assert (chaos.random(200, seed=1) == serial).all() and (chaos.steered(seed=2) == serial).all()
    of_disk = [w for w in waits(program) if _DISK & {program.ops[w.op].queue, program.ops[w.on].queue}]
    assert len(of_disk) >= 4
    assert (chaos.without(of_disk, seed=3) != serial).any(axis=(1, 2)).all()
    for wait in of_disk:
        op, on = program.ops[wait.op], program.ops[wait.on].name
        less = replace(op, waits=tuple(name for name in op.waits if name != on))
        with pytest.raises(InvalidProgram, match="nothing orders them"):
            verify(replace(program, ops=tuple(less if o is op else o for o in program.ops)), a_chain)


def test_what_is_not_sent_written_read_or_fetched_or_comes_through_another_slot_is_rejected():
    program, a_chain, _ = program_of()

    def of(kind: OpKind, item: str) -> Op:
        return next(op for op in program.ops if op.kind is kind and op.subject == item)

    def without(*gone: Op):
        ops = tuple(op for op in program.ops if op not in gone)
        return replace(program, ops=with_waits(ops, a_chain, program.options))

    item = "a:1.1"
    send, write, read = (of(kind, item) for kind in (OpKind.SEND, OpKind.WRITE, OpKind.READ))
    elsewhere = replace(read, slot=next(n for n in range(10, 13) if n != read.slot))
    for damaged, text in (
        (without(send), "does not hold a:1.1 as it was sent"),
        (without(write), "is not on disk"),
        (without(read), "does not hold a:1.1"),
        (without(of(OpKind.FETCH, item)), "is not back on the device"),
        (
            replace(
                program,
                ops=with_waits(tuple(elsewhere if op is read else op for op in program.ops), a_chain, program.options),
            ),
            "does not hold",
        ),
    ):
        with pytest.raises(InvalidProgram, match=text):
            verify(damaged, a_chain)


@pytest.mark.parametrize("shape", [{}, {"slices": 1, "layers": 6}, {"slices": 3, "rounds": 2}, {"clip": True}], ids=str)
def test_the_stage_models_clock_counts_them_as_the_simulation_does_and_the_drive_does_one_thing_at_a_time(shape):
    setting, made = streaming(**shape)
    seen = evaluate(setting, made)
    program = compile_program(seen.plan, setting.chain)
    timeline = simulate(program, setting.chain, MACHINE)
    moved = sum(op.bytes for op in program.queue(Queue.DISK_WRITE))
    busy = dict(timeline.busy_s)
    assert (busy[Queue.DISK_READ], busy[Queue.DISK_WRITE]) == pytest.approx((moved / 4000, moved / 2000))
    least = least_step_s(program, setting.chain, MACHINE)
    assert seen.step_s == pytest.approx(max(timeline.step_s, least), rel=1e-12)
    assert least >= moved / 4000 + moved / 2000
    sent = sum(op.bytes for op in program.ops if op.kind in (OpKind.FETCH, OpKind.SEND))
    assert host_traffic_bytes(program, setting.chain) > sent + 2 * moved


def test_shorter_slices_take_a_drive_as_much_less():
    program, a_chain, _ = program_of(slices=2)
    full, half = (dict(simulate(program, a_chain, MACHINE, shares).busy_s) for shares in ((), (0.5, 0.5)))
    for queue in _DISK:
        assert half[queue] == pytest.approx(full[queue] / 2)
