"""Frozen weights on disk where the host has no memory for them: as many as are needed, and no more."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from planner.candidate.candidate import Candidate
from planner.candidate.evaluate import evaluate
from planner.candidate.setting import Budgets, Setting
from planner.greedy.streaming import profile, streamed
from planner.schedule.compile import OpKind, Queue, compile_program
from planner.schedule.memory_use import cpu_parts, cpu_peak_bytes, ring_bytes
from planner.schedule.simulate import simulate
from planner.schedule.verify import InvalidProgram, verify
from planner.search import from_disk
from planner.search.from_disk import disk_bytes, with_weights_on_disk
from planner.search.problem import Problem
from planner.search.states_on_disk import PARTS, every
from tests.support.chains import HARDWARE, chain, frozen_on_disk

LAYERS, LAYER_BYTES = 16, 1200 * 10**4
SCALE = 10**4
MACHINE = replace(
    HARDWARE,
    h2d_bytes_per_s=1e7,
    d2h_bytes_per_s=1e7,
    gpu_update_parameters_per_s=1e8,
    cpu_memory_bytes_per_s=1e9,
    cpu_update_parameters_per_s=5e6,
    disk_read_bytes_per_s=4e6,
)
SLOW_DRIVE = replace(MACHINE, disk_read_bytes_per_s=1e6)


def frozen_chain(layers: int = LAYERS):
    """Layers of 4 and 8 MB that are not trained, as of a model with adapters; embedding and head are."""
    found = frozen_on_disk(chain(layers))

    def large(t, on_disk):
        sizes = {name: getattr(t, name) * SCALE for name in ("elements", "bytes", "gradient_bytes", "state_bytes")}
        return replace(t, **sizes, on_disk=on_disk)

    blocks = tuple(replace(b, tensors=tuple(large(t, False) for t in b.tensors)) for b in found.blocks)
    return replace(found, blocks=blocks)


def problem(host_bytes: int, *, gpu_bytes: int = 40 * 10**6, clip: bool = True) -> Problem:
    return Problem(
        chain=frozen_chain(),
        hardware=MACHINE,
        gpu_budget_bytes=gpu_bytes,
        cpu_budget_bytes=host_bytes,
        slices=1,
        clip=clip,
    )


def test_where_the_host_has_memory_nothing_is_on_disk():
    for enough in (10**9, 200 * 10**6):
        asked = problem(enough)
        assert with_weights_on_disk(asked) is asked


def test_where_it_has_not_as_much_is_on_disk_as_is_needed_and_the_plan_keeps_both_budgets():
    host_bytes = 120 * 10**6
    asked = problem(host_bytes)
    assert not asked.fits()
    found = with_weights_on_disk(asked)
    assert 0 < disk_bytes(found.chain) <= LAYERS * LAYER_BYTES
    assert not any(t.on_disk for t in found.chain.tensors() if t.trainable)
    names = from_disk._may_be_on_disk(asked)
    parts = next(k for k in range(PARTS + 1) if from_disk._on_disk(asked, every(names, k)) == found)
    assert not from_disk._on_disk(asked, every(names, parts - 1)).fits()
    plan = found.plan()
    program = compile_program(plan, found.chain)
    verify(program, found.chain, gpu_budget_bytes=found.gpu_budget_bytes)
    assert plan.cpu_peak_bytes == cpu_peak_bytes(plan, found.chain) <= host_bytes
    assert cpu_parts(plan, found.chain).ring_bytes == ring_bytes(found.chain) > 4 * 8 * 10**6
    read = sum(op.bytes for op in program.ops if op.kind is OpKind.READ)
    assert read >= disk_bytes(found.chain) - found.gpu_budget_bytes
    assert plan.step_s >= plan.bound_s
    timeline = simulate(program, found.chain, found.hardware)
    assert dict(timeline.busy_s)[Queue.DISK_READ] == pytest.approx(read / 4e6)
    assert timeline.step_s >= 0.999 * read / 4e6


def test_where_no_disk_would_help_the_problem_stays_as_it_was():
    for asked in (problem(20 * 10**6), problem(10**9, gpu_bytes=10**6)):  # no room for the ring; none on the device
        assert with_weights_on_disk(asked) is asked


def test_where_the_host_is_of_more_use_for_activations_weights_are_read_though_they_fit():
    full = replace(problem(200 * 10**6), slices=4)
    assert full.fits()
    found = with_weights_on_disk(full)
    assert disk_bytes(found.chain) > 0 and found.hope_s() < 0.98 * full.hope_s()
    assert found.plan().step_s < 0.99 * full.plan().step_s
    ample = replace(full, cpu_budget_bytes=10**9)
    slow = replace(full, hardware=replace(MACHINE, disk_read_bytes_per_s=1e5))  # reading would take longer
    assert all(with_weights_on_disk(asked) is asked for asked in (ample, slow))


def by_comparing_all(asked: Problem) -> Problem:
    """The problem with none, half or all of its weights on disk, whichever the integer program finds fastest."""
    names, best = from_disk._may_be_on_disk(asked), asked
    for parts in (PARTS // 2, PARTS):
        tried = from_disk._on_disk(asked, every(names, parts))
        if tried.fits() and tried.hope_s() < 0.98 * best.hope_s():
            best = tried
    return best


def test_the_programs_that_are_left_out_would_change_nothing():
    chance, decided = Random(1), []
    while len(decided) < 12:
        drive = replace(MACHINE, disk_read_bytes_per_s=chance.choice((1e5, 4e6, 2e7)))
        asked = problem(int(10**6 * chance.uniform(197, 210)), gpu_bytes=int(10**6 * chance.uniform(36, 44)))
        asked = replace(asked, hardware=drive, slices=chance.choice((2, 4)), clip=chance.random() < 0.5)
        if asked.fits():
            found = with_weights_on_disk(asked)
            assert found == by_comparing_all(asked)
            decided.append((disk_bytes(found.chain) > 0, asked.more_host_may_help(0.98 * asked.hope_s())))
    assert {(True, True), (False, False)} <= set(decided)


def candidate(on_disk: bool) -> tuple[Setting, Candidate]:
    a_chain = frozen_chain(4)
    if on_disk:
        tensors = [tuple(replace(t, on_disk=not t.trainable) for t in b.tensors) for b in a_chain.blocks]
        blocks = (replace(b, tensors=of) for b, of in zip(a_chain.blocks, tensors, strict=True))
        a_chain = replace(a_chain, blocks=tuple(blocks))
    budgets = Budgets(gpu_bytes=10**9, cpu_bytes=10**9)
    setting = Setting(chain=a_chain, hardware=SLOW_DRIVE, budgets=budgets, slices=2, clip=True)
    return setting, streamed(setting, profile(setting, "recompute"), ahead=True, source="streamed")


def test_the_stage_models_clock_counts_reads_as_the_simulation_does():
    steps = {}
    for on_disk in (False, True):
        setting, made = candidate(on_disk)
        seen = evaluate(setting, made)
        program = compile_program(seen.plan, setting.chain)
        steps[on_disk] = simulate(program, setting.chain, SLOW_DRIVE).step_s
        assert seen.step_s == pytest.approx(steps[on_disk], rel=1e-12)
    assert steps[True] > 1.5 * steps[False]


def test_a_fetch_of_what_was_not_read_or_was_read_over_is_rejected():
    setting, made = candidate(True)
    program = compile_program(evaluate(setting, made).plan, setting.chain)
    verify(program, setting.chain)
    read = next(op for op in program.ops if op.kind is OpKind.READ)
    without = tuple(replace(op, waits=tuple(w for w in op.waits if w != read.name)) for op in program.ops if op != read)
    with pytest.raises(InvalidProgram, match="was not read from disk"):
        verify(replace(program, ops=without), setting.chain)
    fetch = next(op for op in program.ops if op.kind is OpKind.FETCH and op.subject == read.subject)
    elsewhere = tuple(replace(op, slot=None) if op == fetch else op for op in program.ops)
    with pytest.raises(InvalidProgram, match="was not read from disk"):
        verify(replace(program, ops=elsewhere), setting.chain)
