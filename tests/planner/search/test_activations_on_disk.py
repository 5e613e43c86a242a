"""Activations on disk where the host has no memory for them, a drive is given, and the step is shorter for it."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from planner.candidate.evaluate import evaluate
from planner.greedy.streaming import profile, streamed
from planner.ilp.instance import make_instance
from planner.ilp.program import solve_oilp
from planner.machine.hardware import Hardware
from planner.picture.plan_decisions import decisions
from planner.reports.make_receipt import receipt
from planner.reports.receipt import Asked
from planner.schedule.chain import Chain
from planner.schedule.compile import Queue, compile_program
from planner.schedule.disk_use import DiskUse, disk_use
from planner.schedule.memory_use import cpu_peak_bytes
from planner.schedule.plan import Plan
from planner.schedule.simulate import written_bytes
from planner.schedule.verify import verify
from planner.search.activations_on_disk import has_twins, may_be_stored, most_on_disk, with_twins
from planner.search.from_disk import with_disk
from planner.search.make_plan import bound_of
from planner.search.problem import Problem
from tests.support.chains import HARDWARE, chain

SCALE = 10**4
MACHINE = replace(
    HARDWARE,
    h2d_bytes_per_s=2e7,
    d2h_bytes_per_s=2e7,
    cpu_memory_bytes_per_s=1e9,
    disk_read_bytes_per_s=1e7,
    disk_write_bytes_per_s=8e6,
    disk_bytes=10**12,
)
LAYERS, OFFLOADED = 10, 500 * SCALE
HOST = 4 * OFFLOADED + 80_000  # of the activations of 10 layers


def heavy(layers: int = LAYERS) -> Chain:
    """Small weights; activations of 10 MB a layer, 5 MB of which travel; a second to compute them once more."""
    found = chain(layers)

    def scaled(option):
        sizes = ("saved_bytes", "offloaded_bytes", "forward_peak_bytes", "backward_peak_bytes")
        return replace(option, **{name: SCALE * getattr(option, name) for name in sizes})

    blocks = (replace(b, options=tuple(map(scaled, b.options))) for b in found.blocks)
    return replace(found, blocks=tuple(blocks))


def problem(*, host_bytes: int = HOST, hardware: Hardware = MACHINE, slices: int = 1, clip: bool = False) -> Problem:
    return Problem(
        chain=heavy(),
        hardware=hardware,
        gpu_budget_bytes=45 * 10**6,
        cpu_budget_bytes=host_bytes,
        slices=slices,
        clip=clip,
    )


@functools.cache
def stored(slices: int = 1, clip: bool = False) -> tuple[Problem, Plan]:
    """The problem with activations on disk where that is better, and its plan."""
    found = with_disk(problem(slices=slices, clip=clip))
    return found, found.plan()


def test_without_a_disk_and_where_the_host_has_memory_nothing_changes():
    for asked in (
        problem(hardware=replace(MACHINE, disk_bytes=0)),
        problem(host_bytes=10**9),
        replace(problem(), activation_offload=False),
    ):
        assert not may_be_stored(asked) and with_disk(asked) is asked
    slow = problem(hardware=replace(MACHINE, disk_read_bytes_per_s=1e5, disk_write_bytes_per_s=1e5))
    assert may_be_stored(slow) and with_disk(slow) is slow  # no 3% are gained


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("slices", "clip"), [(1, False), (1, True), (2, False), (4, False)])
def test_the_step_is_shorter_and_the_plan_keeps_its_budgets_and_says_what_it_writes(slices, clip):
    asked = problem(slices=slices, clip=clip)
    (found, plan), before = stored(slices, clip), asked.plan()
    assert has_twins(found.chain)
    assert plan.step_s < 0.97 * before.step_s
    program = compile_program(plan, found.chain)
    verify(program, found.chain, gpu_budget_bytes=asked.gpu_budget_bytes)
    assert plan.cpu_peak_bytes == cpu_peak_bytes(plan, found.chain) <= asked.cpu_budget_bytes
    assert plan.bound_s <= plan.step_s <= 1.2 * plan.lp_step_s
    written = written_bytes(program)
    assert written and sum(op.bytes for op in program.queue(Queue.DISK_READ)) == written
    use = disk_use(plan, found.chain, [], 10**12, steps=10)
    assert use == DiskUse(written_bytes=written, rated_bytes=10**12, stated=True, steps=10, activation_bytes=written)
    assert next(use.lines()).endswith("of activations") and "states" not in next(use.lines())
    told = receipt(plan, found.chain, found.hardware, ASKED, gap=0.01)
    assert told.disk_use is not None and told.disk_use.written_bytes == written
    assert {"reads from disk", "writes to disk"} <= {load.resource for load in told.loads}
    assert "activations on their way to and from disk" in {share.name for share in told.host}
    assert {s.name: s.bytes for s in told.disk}["activations on drives"] == written // plan.rounds
    there = [block for block in decisions(plan, found.chain) if block.option.endswith("-disk")]
    assert there and all(block.treatment.endswith(", and on to disk") for block in there)


ASKED = Asked(model="m", dtype="bf16", length=1, rows=1, slices=1, clip=False)


def test_no_more_is_written_than_there_is_room_for_and_than_the_drive_sustains():
    free, best = stored()
    most = written_bytes(compile_program(best, free.chain))
    for hardware in (
        replace(MACHINE, disk_bytes=most // 2),
        replace(MACHINE, disk_sustained_bytes_per_s=most / 2 / free.hope_s()),
    ):
        asked = replace(free, hardware=hardware)
        plan = asked.plan()
        written = written_bytes(compile_program(plan, asked.chain))
        assert 0 < written < most
        sustained = hardware.disk_sustained_bytes_per_s
        assert not sustained or written <= 1.001 * sustained * plan.step_s
    setting = replace(free, hardware=replace(MACHINE, disk_bytes=most // 2)).setting
    names = [option + "-disk" if option == "offload" else option for option in profile(setting, "offload")]
    too_much = evaluate(setting, streamed(setting, names, ahead=True, source="streamed"))
    assert too_much.disk_bytes < 0 and not too_much.fits


def test_what_would_not_fit_fits_with_activations_on_disk():
    """On the device there is room for two layers' activations, on the host for one's; inputs are large."""
    blocks = tuple(
        replace(b, options=tuple(o for o in b.options if o.name == "offload") or b.options) for b in heavy().blocks
    )
    asked = replace(problem(), chain=replace(heavy(), blocks=blocks))
    assert not asked.fits()
    found = with_disk(asked)
    plan = found.plan()
    assert sum(name == "offload-disk" for name in plan.options) >= LAYERS - 3  # three slots, three on the host
    little = replace(asked, hardware=replace(MACHINE, disk_bytes=OFFLOADED))
    assert not with_disk(little).fits()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_the_solvers_step_is_no_shorter_than_the_bound_and_near_what_is_simulated(slices):
    asked = problem(host_bytes=HOST * slices, slices=slices)
    asked = replace(asked, chain=with_twins(asked.chain))
    solution = solve_oilp(make_instance(asked.setting), gap=0.001)
    assert solution is not None
    assert bound_of(asked.setting) <= solution.step_s * 1.0001
    assert abs(asked.plan().step_s / solution.step_s - 1) < 0.2


def test_twins_are_the_same_options_with_lifetimes_of_their_own():
    found = with_twins(heavy(2))
    own, twin = (found.blocks[1].option(name) for name in ("offload", "offload-disk"))
    assert replace(twin, name="offload", on_disk=False) == own
    assert with_twins(found) == found
    weights = sum(t.state_bytes + t.bytes + t.gradient_bytes for t in found.tensors() if t.trainable)
    assert most_on_disk(found, 3) == weights + 3 * 2 * OFFLOADED
