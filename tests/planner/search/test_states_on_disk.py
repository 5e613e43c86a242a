"""Optimizer states on disk where the host has no memory for them: as many as are needed, and no more."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from planner.candidate.candidate import Side
from planner.candidate.evaluate import evaluate, host_bytes
from planner.candidate.setting import Budgets, Setting
from planner.errors import UserError
from planner.greedy.streaming import frugal, profile, streamed
from planner.ilp import columns
from planner.reports.make_receipt import disk_shares
from planner.reports.receipt import Asked
from planner.schedule.compile import OpKind, Queue, compile_program, order_program, with_waits
from planner.schedule.memory_use import cpu_parts, cpu_peak_bytes, gpu_peak_bytes, state_ring_bytes
from planner.schedule.plan import Plan
from planner.schedule.simulate import simulate
from planner.schedule.verify import InvalidProgram, verify
from planner.search import states_on_disk
from planner.search.list_schedule import Manner, timed
from planner.search.make_plan import bound_of, rounds_that_fit
from planner.search.problem import Problem
from planner.search.round_placements import hoped, rounded_candidate
from planner.search.states_on_disk import (
    as_few_as_fit,
    check_disk_budget,
    decided_anew,
    disk_need_bytes,
    every,
    with_states_on_disk,
)
from planner.whatif.what_helps import variations
from tests.support.chains import HARDWARE, chain, with_masters
from tests.support.chaos import Chaos, waits

_DISK = {Queue.DISK_READ, Queue.DISK_WRITE}
LAYERS, SCALE, PIECE = 6, 10**4, 2**18
MACHINE = replace(
    HARDWARE,
    h2d_bytes_per_s=1e7,
    d2h_bytes_per_s=1e7,
    gpu_update_parameters_per_s=1e8,
    cpu_memory_bytes_per_s=1e9,
    cpu_update_parameters_per_s=5e6,
    disk_read_bytes_per_s=2e7,
    disk_write_bytes_per_s=1e7,
    disk_bytes=10**12,
)
SLOW_DRIVE = replace(MACHINE, disk_read_bytes_per_s=2e6, disk_write_bytes_per_s=1e6)


def large_chain(layers: int = LAYERS, *, masters: bool = False):
    """Layers of 3 M parameters: 12 MB of fp32 weights and 24 MB of states, or 6 MB and 36 MB."""
    found = with_masters(chain(layers)) if masters else chain(layers)

    def large(t):
        sizes = {name: getattr(t, name) * SCALE for name in ("elements", "bytes", "gradient_bytes", "state_bytes")}
        return replace(t, **sizes)

    blocks = tuple(replace(b, tensors=tuple(map(large, b.tensors))) for b in found.blocks)
    return replace(found, blocks=blocks)


def problem(host_bytes: int, *, hardware=MACHINE, gpu_bytes: int = 60 * 10**6, clip: bool = False, **of) -> Problem:
    return Problem(
        chain=large_chain(**of),
        hardware=hardware,
        gpu_budget_bytes=gpu_bytes,
        cpu_budget_bytes=host_bytes,
        slices=1,
        clip=clip,
    )


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(states_on_disk, "PIECE_ELEMENTS", PIECE)


@functools.cache
def stored(host_bytes: int, *, clip: bool = False, masters: bool = False) -> Problem:
    """The problem with as many megabytes for the host, its states where they are best."""
    return with_states_on_disk(problem(host_bytes * 10**6, clip=clip, masters=masters))


@functools.cache
def planned(host_bytes: int, *, clip: bool, masters: bool) -> Plan:
    return stored(host_bytes, clip=clip, masters=masters).plan()


def test_without_a_disk_and_where_the_host_has_memory_the_problem_is_the_same_one():
    no_disk = problem(150 * 10**6, hardware=replace(MACHINE, disk_bytes=0))
    assert not no_disk.fits() and with_states_on_disk(no_disk) is no_disk
    for asked in (problem(10**9), problem(30 * 10**6)):  # enough; too little for the weights alone
        assert with_states_on_disk(asked) is asked


@pytest.mark.parametrize(("clip", "masters", "host_bytes"), [(False, False, 190), (True, True, 140)])
def test_those_are_on_disk_with_which_the_solver_hopes_for_most_and_the_plan_keeps_both_budgets(
    clip, masters, host_bytes
):
    asked = problem(host_bytes * 10**6, clip=clip, masters=masters)
    assert not asked.fits()
    found = stored(host_bytes, clip=clip, masters=masters)
    names = states_on_disk._may_be_on_disk(asked)
    few = as_few_as_fit(asked, lambda parts: states_on_disk._on_disk(asked, every(names, parts)))
    free_s = states_on_disk._on_disk(asked, names).hoped(states_anywhere=True).step_s
    assert free_s * 0.99 <= found.hope_s() <= 1.03 * few.hope_s()  # within the solver's gap, a whole tensor more
    plan = planned(host_bytes, clip=clip, masters=masters)
    program = compile_program(plan, found.chain)
    verify(program, found.chain, gpu_budget_bytes=found.gpu_budget_bytes)
    assert plan.cpu_peak_bytes == cpu_peak_bytes(plan, found.chain) <= host_bytes * 10**6
    assert cpu_parts(plan, found.chain).state_ring_bytes == state_ring_bytes(found.chain) > 0
    updated = [t for t in found.chain.tensors() if t.states_on_disk and t.name in plan.cpu_updated()]
    assert disk_need_bytes(plan, found.chain, homes=2) >= 2 * sum(t.state_bytes for t in updated)
    read, written = (sum(op.bytes for op in program.queue(q)) for q in (Queue.DISK_READ, Queue.DISK_WRITE))
    again = sum(op.bytes for op in program.ops if op.kind is OpKind.PEEK)
    assert 0 < sum(t.state_bytes for t in updated) <= read - again == written
    assert plan.bound_s <= plan.step_s
    timeline = simulate(program, found.chain, found.hardware)
    assert dict(timeline.busy_s)[Queue.DISK_READ] == pytest.approx(read / 2e7 + written / 1e7)
    assert timeline.step_s >= 0.999 * (read / 2e7 + written / 1e7)


def test_with_clipping_states_trail_their_weight_and_the_solver_hopes_for_a_shorter_step(monkeypatch):
    asked, found = problem(140 * 10**6, clip=True, masters=True), stored(140, clip=True, masters=True)
    trails_s = found.hope_s()
    setting = next(s for s in rounds_that_fit(found.setting) if s.rounds == 1)
    solution = hoped(setting, gap=0.01)[0]
    made = rounded_candidate(setting, solution, gap=0.01, source="")
    assert 0 < sum(j.tensor.bytes for j in made.candidate.schedules if j.trails) <= sum(solution.totals.of["U"]) + 1
    assert made.fits
    limits = columns.limits_of
    monkeypatch.setattr(columns, "limits_of", lambda p: {k: of for k, of in limits(p).items() if k != "U"})
    asked = replace(asked, hardware=replace(asked.hardware, name="one that is not remembered"))
    assert trails_s < 0.85 * with_states_on_disk(asked).hope_s()


def test_states_keep_to_the_room_on_disk_and_where_a_plan_needs_more_it_has_as_few_as_it_needs():
    def there(of: Problem) -> int:
        return states_on_disk._stored_bytes(of, {t.name for t in of.chain.tensors()})

    asked = problem(190 * 10**6)
    names = states_on_disk._may_be_on_disk(asked)
    few = as_few_as_fit(asked, lambda parts: states_on_disk._on_disk(asked, every(names, parts)))
    most = there(states_on_disk._on_disk(asked, names))
    assert there(few) < most
    for room in (there(few), (there(few) + most) // 2):
        found = with_states_on_disk(replace(asked, hardware=replace(MACHINE, disk_bytes=room)))
        assert found.fits() and 0 < there(found) <= room
    none = with_states_on_disk(replace(asked, hardware=replace(MACHINE, disk_bytes=1)))
    assert none.chain == few.chain  # what is asked for then is enough


def test_what_a_drive_sustains_bounds_the_step():
    setting, made = streaming()
    seen = evaluate(setting, made)
    written = sum(op.bytes for op in compile_program(seen.plan, setting.chain).queue(Queue.DISK_WRITE))
    tired = replace(setting, hardware=replace(SLOW_DRIVE, disk_sustained_bytes_per_s=2e5))
    assert evaluate(tired, made).step_s == pytest.approx(written / 2e5)
    assert written / 2e5 > seen.step_s
    assert seen.step_s >= bound_of(setting) > 0 and written / 2e5 >= bound_of(tired)


def test_updates_whose_states_the_drive_has_still_to_read_hold_up_no_others():
    """The states of the upper layers are on a slow drive. Played as if that took no time, their updates would all be
    begun in the backward, before those of the lower layers, which the next forward needs first."""
    setting, _ = streaming(layers=8)
    tensors = list(setting.chain.tensors())
    upper = {t.name for t in tensors[len(tensors) // 2 + 1 :]}
    blocks = tuple(
        replace(b, tensors=tuple(replace(t, states_on_disk=t.name in upper) for t in b.tensors))
        for b in setting.chain.blocks
    )
    drive = replace(SLOW_DRIVE, disk_read_bytes_per_s=4e6, disk_write_bytes_per_s=2e6)
    setting = replace(setting, chain=replace(setting.chain, blocks=blocks), hardware=drive)
    start = evaluate(setting, streamed(setting, profile(setting, "recompute"), ahead=True, source="streamed"))
    written = sum(op.bytes for op in compile_program(start.plan, setting.chain).queue(Queue.DISK_WRITE))
    drive_s = written * drive.disk_s_per_byte
    assert start.step_s > 1.25 * drive_s  # blindly played it is 1.3
    played = timed(setting, start.candidate, start.plan, start.room_bytes, Manner())
    assert evaluate(setting, played).step_s < 1.1 * drive_s


def streaming(*, clip: bool = False, masters: bool = False, layers: int = 3):
    """All that may is updated by the CPU, with its states on disk."""
    a_chain = large_chain(layers, masters=masters)
    tensors = [tuple(replace(t, states_on_disk=True) for t in b.tensors) for b in a_chain.blocks]
    blocks = tuple(replace(b, tensors=of) for b, of in zip(a_chain.blocks, tensors, strict=True))
    a_chain = replace(a_chain, blocks=blocks, piece_elements=2**19)
    budgets = Budgets(gpu_bytes=10**9, cpu_bytes=10**9)
    setting = Setting(chain=a_chain, hardware=SLOW_DRIVE, budgets=budgets, slices=2, clip=clip)
    return setting, streamed(setting, profile(setting, "recompute"), ahead=True, source="streamed")


@pytest.mark.parametrize("clip", [False, True])
def test_the_stage_models_clock_counts_reads_and_writes_as_the_simulation_does(clip):
    setting, made = streaming(clip=clip)
    seen = evaluate(setting, made)
    program = compile_program(seen.plan, setting.chain)
    step_s = simulate(program, setting.chain, SLOW_DRIVE).step_s
    assert seen.step_s == pytest.approx(step_s, rel=1e-12)
    moved = sum(op.bytes for op in program.queue(Queue.DISK_WRITE))
    assert 1.0 <= step_s / (1.5 * moved / 1e6) < (1.05 if not clip else 1.6)  # the drive limits, and has hardly to wait


@pytest.mark.parametrize(("clip", "masters"), [(False, True), (True, False)])
def test_every_order_computes_the_same_and_a_missing_wait_is_seen_by_the_proof_and_by_an_order(clip, masters):
    setting, made = streaming(clip=clip, masters=masters, layers=2)
    program = compile_program(evaluate(setting, made).plan, setting.chain)
    verify(program, setting.chain)
    chaos = Chaos(program, setting.chain)
    serial = chaos.serial()
    assert (chaos.random(200, seed=1) == serial).all() and (chaos.steered(seed=2) == serial).all()
    of_disk = [w for w in waits(program) if _DISK & {program.ops[w.op].queue, program.ops[w.on].queue}]
    assert len(of_disk) > 30
    seen = chaos.without(of_disk, seed=3) != serial
    assert seen.any(axis=(1, 2)).all()
    for wait in of_disk:
        op, on = program.ops[wait.op], program.ops[wait.on].name
        less = replace(op, waits=tuple(name for name in op.waits if name != on))
        with pytest.raises(InvalidProgram, match="nothing orders them"):
            verify(replace(program, ops=tuple(less if o is op else o for o in program.ops)), setting.chain)


def without(program, a_chain, *gone):
    """What is left, with waits of its own."""
    ops = (op for op in program.ops if op not in gone)
    return replace(program, ops=with_waits(tuple(ops), a_chain, program.options))


def test_pieces_that_are_not_read_not_written_or_left_out_are_rejected():
    setting, made = streaming()
    program = compile_program(evaluate(setting, made).plan, setting.chain)
    read, update, write = (program.queue(queue)[3] for queue in (Queue.DISK_READ, Queue.CPU, Queue.DISK_WRITE))
    assert read.subject == write.subject == f"s:{update.subject}"
    for damaged, text in (
        (without(program, setting.chain, read), "does not hold the piece as it is now"),
        (without(program, setting.chain, write), "does not hold the piece as it is now"),
        (without(program, setting.chain, update), "does not hold the updated piece"),
        (without(program, setting.chain, read, update, write), "is updated 0 times a step"),
    ):
        with pytest.raises(InvalidProgram, match=text):
            verify(damaged, setting.chain)


def test_a_disk_budget_without_room_for_the_states_is_told_with_both_sizes():
    for enough in (None, 2**30):
        check_disk_budget(2**30, enough, homes=1)
    with pytest.raises(UserError, match=r"no room for what goes to disk\.\n.*512\.0 MiB, needed 1\.0 GiB") as raised:
        check_disk_budget(2**30, 2**29, homes=2)
    assert raised.value.code == "disk-too-small" and "save_total_limit: 2" in str(raised.value.hint)


def test_with_more_memory_it_is_decided_anew_which_states_are_on_disk():
    found = stored(190)
    there = sum(t.state_bytes for t in found.chain.tensors() if t.states_on_disk)
    assert there
    assert not any(t.states_on_disk for t in decided_anew(replace(found, cpu_budget_bytes=10**9)).chain.tensors())
    less = decided_anew(replace(found, cpu_budget_bytes=230 * 10**6))
    assert 0 < sum(t.state_bytes for t in less.chain.tensors() if t.states_on_disk) < there
    in_memory = problem(10**9)
    assert decided_anew(in_memory) is in_memory
    assert ["twice as many drives" in dict(variations(each)) for each in (found, in_memory)] == [True, False]
    one, two = found.hardware, dict(variations(found))["twice as many drives"].hardware
    assert two == replace(
        one,
        disk_read_bytes_per_s=2 * one.disk_read_bytes_per_s,
        disk_bytes=2 * one.disk_bytes,
        disk_write_bytes_per_s=2 * one.disk_write_bytes_per_s,
    )


def test_each_layer_has_its_part_on_disk():
    """So the drive is never long without work, nor the CPU."""
    found = stored(190)
    on_disk = [sum(t.bytes for t in block.tensors if t.states_on_disk) for block in found.chain.blocks[1:-1]]
    assert min(on_disk) > 0 and max(on_disk) < 3 * min(on_disk)


def test_what_goes_to_the_device_first_where_the_host_is_full_has_its_states_in_memory():
    """Of states on disk there is nothing in memory to be rid of."""
    all_there = states_on_disk._on_disk(problem(10**9), ["l3.a", "l3.b", "l4.a", "l4.b", "l5.a", "l5.b", "h"]).setting
    need = host_bytes(frugal(all_there, lambda _: 0, lambda d: host_bytes(d, all_there)), all_there)
    less = replace(all_there, budgets=Budgets(gpu_bytes=10**9, cpu_bytes=need - 50 * 10**6))
    made = frugal(less, lambda d: 10**15 * (d.source != "frugal, host full"), lambda d: host_bytes(d, less))
    assert [j.tensor.name for j in made.schedules if j.side is Side.GPU] == ["l1.b", "l2.a", "l2.b"]


def test_the_receipt_counts_states_on_drives_twice_where_a_checkpoint_names_them():
    stored, asked = 10**6, Asked(model="m", dtype="bf16", length=1, rows=1, slices=1, clip=False, keep=1)
    one, two = (
        {share.name: share.bytes for share in disk_shares(large_chain(2), replace(asked, keep=keep), stored)}
        for keep in (1, 2)
    )
    assert one["optimizer states on drives, twice"] == 2 * stored and two["optimizer states on drives"] == stored
    assert one["a checkpoint being written"] == two["a checkpoint being written"] - stored


@pytest.mark.parametrize("clip", [False, True])
def test_the_devices_peak_is_the_same_whether_updates_are_spelled_out_by_pieces(clip):
    found, plan = (of(140, clip=clip, masters=True) for of in (stored, planned))
    whole = order_program(plan, found.chain, by_pieces=False)
    assert len(whole.ops) < len(order_program(plan, found.chain).ops)
    assert gpu_peak_bytes(whole, found.chain) == plan.gpu_peak_bytes


def test_where_weights_and_states_are_more_than_all_memory_nothing_is_searched(monkeypatch):
    least = problem(10**9).chain
    standing = sum(t.bytes + t.state_bytes for t in least.tensors())
    monkeypatch.setattr(Problem, "least_bytes", lambda *_, **__: pytest.fail("a search"))
    assert not problem(standing - 60 * 10**6 - 1).fits()
    with pytest.raises(pytest.fail.Exception):
        problem(standing - 60 * 10**6).fits()
