"""Trained weights wholly on disk where the host has not even memory for working copies: as few as are needed."""

from __future__ import annotations

import functools
from dataclasses import replace
from random import Random

import pytest

from planner.candidate.candidate import Side
from planner.candidate.evaluate import evaluate, proven
from planner.greedy.streaming import profile, streamed
from planner.schedule.compile import Queue, compile_program
from planner.schedule.disk_use import disk_use
from planner.schedule.memory_use import cpu_parts, cpu_peak_bytes, gradient_slot_bytes, slot_bytes
from planner.schedule.operations import GRADIENT_SLOTS, SLOTS, OpKind
from planner.schedule.simulate import simulate
from planner.schedule.verify import verify
from planner.search import states_on_disk
from planner.search.improve import Decisions
from planner.search.problem import Problem
from planner.search.states_on_disk import disk_need_bytes, with_all_on_disk, with_states_on_disk
from planner.whatif.trace import traced
from planner.whatif.ways_to_fit import ways_to_fit
from tests.planner.search.test_states_on_disk import MACHINE, PIECE, problem
from tests.support.texts import make_job, sentences, tiny_llama_folder, write_jsonl

HOST = 80 * 10**6  # for 76 MB of weights, and rings of 47 MB


def large(host_bytes: int = HOST, **of) -> Problem:
    return problem(host_bytes, layers=12, masters=True, **of)


@functools.cache
def stored(*, clip: bool) -> Problem:
    return with_states_on_disk(large(clip=clip))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(states_on_disk, "PIECE_ELEMENTS", PIECE)


def there(found: Problem) -> list[str]:
    return [t.name for t in found.chain.tensors() if t.wholly_on_disk]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("clip", [False, True], ids=["free", "clipped"])
def test_as_few_are_there_as_are_needed_and_the_plan_keeps_both_budgets(clip):
    asked = large(clip=clip)
    states = states_on_disk._on_disk(asked, states_on_disk._may_be_on_disk(asked))
    assert not states.fits()
    found = stored(clip=clip)
    chain, may = found.chain, states_on_disk._may_be_wholly_on_disk(states)
    assert 0 < len(there(found)) < len(may)
    assert not states_on_disk._wholly_on_disk(states, there(found)[::2]).fits()
    plan = found.plan()
    program = compile_program(plan, chain)
    verify(program, chain, gpu_budget_bytes=found.gpu_budget_bytes)
    assert plan.cpu_peak_bytes == cpu_peak_bytes(plan, chain) <= HOST
    assert cpu_parts(plan, chain).ring_bytes == SLOTS * slot_bytes(chain) + GRADIENT_SLOTS * gradient_slot_bytes(chain)
    updated = [t for t in chain.tensors() if t.wholly_on_disk and t.name in plan.cpu_updated()]
    assert updated
    writes, reads = program.queue(Queue.DISK_WRITE), program.queue(Queue.DISK_READ)
    for t in updated:
        assert sum(op.subject in (f"w:{t.name}", f"g:{t.name}") for op in writes) == 2
        assert 2 <= sum(op.subject in (f"w:{t.name}", f"g:{t.name}") for op in reads) <= 3
    use = disk_use(plan, chain, (), 10**12, steps=10)
    again = sum(op.bytes for op in reads if op.kind is OpKind.PEEK)
    assert use.weight_bytes == sum(2 * t.bytes for t in updated) == chain.passing_bytes(plan.cpu_updated())
    assert use.written_bytes <= sum(op.bytes for op in writes) <= 1.01 * use.written_bytes
    assert use.again_bytes <= again <= 1.01 * use.again_bytes
    assert "gradients and weights (read in each pass)" in next(use.lines())
    assert disk_need_bytes(plan, chain, homes=2) >= 2 * (use.written_bytes - use.weight_bytes) + use.weight_bytes
    assert plan.bound_s <= plan.step_s == pytest.approx(simulate(program, chain, found.hardware).step_s, rel=0.05)


def test_where_the_host_has_memory_for_working_copies_none_are_there_and_with_too_little_for_any_nothing_changes():
    assert not there(with_states_on_disk(large(140 * 10**6)))
    for asked in (large(10**6), problem(30 * 10**6)):  # too small for the rings; without masters
        assert with_states_on_disk(asked) is asked
    no_updates = replace(large(), cpu_updates=False)
    assert not there(with_states_on_disk(no_updates))


def test_where_loading_takes_memory_for_all_weights_none_are_there_and_it_is_said_why(tmp_path):
    asked = replace(large(), not_in_files="they are in float32, and loaded as bfloat16")
    assert with_states_on_disk(asked) is asked and not there(with_all_on_disk(asked))
    data = write_jsonl(tmp_path / "data.jsonl", sentences(8))
    job = make_job(tiny_llama_folder(tmp_path / "model"), data, method="full", bf16=True, max_length=64)
    trace = functools.partial(traced, hardware=asked.hardware)
    told = [str(way) for way in ways_to_fit(job, asked, trace, runs=True)]
    (why,) = (way for way in told if "wholly" in way)
    assert why.startswith(
        "weights wholly on the drive, if the model's files had them as they are trained (loading these takes memory "
        "for all: they are in float32, and loaded as bfloat16): at least "
    )
    assert not any("wholly" in str(way) for way in ways_to_fit(job, large(), trace, runs=True))


def test_what_all_on_disk_needs_is_less_than_the_working_copies_take():
    asked = large(hardware=replace(MACHINE, disk_bytes=0))
    weights = sum(t.bytes for t in asked.chain.tensors())
    everything = with_all_on_disk(asked)
    rings = cpu_parts(everything.plan(), everything.chain)
    assert everything.fits() and rings.weights_bytes < 0.4 * weights


@pytest.mark.parametrize("clip", [False, True], ids=["free", "clipped"])
def test_no_change_of_a_search_lets_the_device_send_what_the_host_has_no_copy_of(clip):
    found = stored(clip=clip)
    chain = replace(
        found.chain,
        blocks=tuple(
            replace(b, tensors=tuple(replace(t, on_disk=t.states_on_disk and b.kind == "layer") for t in b.tensors))
            for b in found.chain.blocks
        ),
    )
    setting = replace(found, chain=chain, cpu_budget_bytes=10**9, gpu_budget_bytes=10**9).setting
    candidate = streamed(setting, profile(setting, "fast"), ahead=True, source="streamed")
    decisions, chance, sides = Decisions(setting), Random(5), set()
    names = {t.name for t in chain.tensors() if t.wholly_on_disk}
    assert names
    for _ in range(60):
        candidate = decisions.changed(candidate, chance)
        if evaluate(setting, candidate).fits:
            proven(candidate, setting)
            sides |= {j.side for j in candidate.schedules if j.tensor.name in names}
    assert sides == {Side.CPU, Side.GPU}
