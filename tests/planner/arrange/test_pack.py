"""Places for spans: none overlap, little is lost, and the same spans get the same places."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest

from planner.arrange import pack as packing
from planner.arrange.pack import pack, with_places
from planner.errors import UserError
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from planner.schedule.places import GRAIN_BYTES, Span, Spans
from planner.schedule.verify import InvalidProgram, verify
from planner.search.problem import Problem
from tests.support.arena_alone import Replay, replay_random, shorter
from tests.support.random_plans import random_plan
from tests.support.shapes import llama_chain, machine


class Given(Spans):
    """Spans that are given, and not a program's."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans, self.below_bytes = spans, 0


def height(spans: list[Span], offsets: tuple[int, ...]) -> int:
    return max(offset + span.bytes for offset, span in zip(offsets, spans, strict=True))


def overlapping(spans: list[Span], offsets: tuple[int, ...]) -> list[tuple[Span, Span]]:
    """Pairs that meet in time and in place."""
    pairs = ((i, j) for i in range(len(spans)) for j in range(i))
    return [
        (spans[i], spans[j])
        for i, j in pairs
        if packing._meet(spans[i], spans[j])
        and offsets[i] < offsets[j] + spans[j].bytes
        and offsets[j] < offsets[i] + spans[i].bytes
    ]


def random_spans(chance: random.Random, count: int) -> list[Span]:
    spans = []
    for _ in range(count):
        start = chance.randrange(100)
        span = Span(GRAIN_BYTES * chance.choice((1, 2, 2, 5, 16, 40)), start, start + chance.randint(1, 40))
        if chance.random() < 0.2:  # it comes back for the next step
            span = replace(span, end=200, before=chance.randint(1, start + 1))
        elif chance.random() < 0.3:  # in all slices of a stage, at one time of the turn
            low = chance.randrange(20)
            span = replace(span, group=start // 10, low=low, high=low + chance.randint(1, 10))
        spans.append(span)
    return spans


def test_what_a_turn_lets_go_of_makes_room_for_what_the_next_one_needs() -> None:
    """Two of three small ones stay while a large one comes: between them it would find no room."""
    small, large = 3 * GRAIN_BYTES, 6 * GRAIN_BYTES
    spans = [Span(small, 0, 9), Span(small, 1, 4), Span(small, 2, 9), Span(small, 3, 5), Span(large, 5, 9)]
    assert height(spans, pack(Given(spans))) == Given(spans).least_bytes() == 12 * GRAIN_BYTES


def test_what_comes_back_for_the_next_step_lies_where_that_one_looks_for_it() -> None:
    here, there = Span(8 * GRAIN_BYTES, 6, 10, before=3), Span(8 * GRAIN_BYTES, 3, 6)
    assert pack(Given([here, there])) == (0, 0)
    assert len(set(pack(Given([here, replace(there, start=2)])))) == 2


@pytest.mark.parametrize("seed", range(20))
def test_no_two_spans_overlap_with_and_without_a_compiler(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "EFFORT", 10**7)
    spans = random_spans(random.Random(seed), 60)
    found = pack(Given(spans))
    assert overlapping(spans, found) == []
    assert found == pack(Given(spans))
    monkeypatch.setattr(packing, "_library", lambda: None)
    first = pack(Given(spans))
    assert overlapping(spans, first) == []
    assert height(spans, found) <= height(spans, first)


def test_the_library_begins_with_what_is_done_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "EFFORT", 0)
    for seed in range(30):
        spans = random_spans(random.Random(seed), 40)
        compiled = pack(Given(spans))
        with monkeypatch.context() as patch:
            patch.setattr(packing, "_library", lambda: None)
            assert height(spans, pack(Given(spans))) == height(spans, compiled)


@pytest.mark.sweep(30)
@pytest.mark.parametrize("seed", range(30))  # more by hand: benchmarks/arena.py --plans
def test_a_random_plan_gets_places_that_verify_proves_and_in_which_slices_of_all_lengths_run(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "EFFORT", 2 * 10**7)
    chain, *others = lengths_of_a_llama()
    plan, found = replay_random(chain, seed, others=others)
    assert found == Replay(reserved_bytes=plan.gpu_peak_bytes, calls=0, strays=0)
    program = compile_program(plan, chain)
    verify(program, chain, gpu_budget_bytes=plan.gpu_peak_bytes, offsets=plan.offsets)
    assert plan.gpu_peak_bytes <= 1.12 * gpu_peak_bytes(program, chain)
    with pytest.raises(InvalidProgram, match="the peak is"):
        verify(program, chain, gpu_budget_bytes=plan.gpu_peak_bytes - 1, offsets=plan.offsets)


@functools.cache
def lengths_of_a_llama() -> tuple[Chain, ...]:
    """For slices of 1024 tokens, and of a half and a quarter of them."""
    chain = llama_chain("0.3B", layers=3)
    return chain, *(shorter(chain, llama_chain("0.3B", layers=3, length=n)) for n in (512, 256))


def test_a_tensor_moved_onto_another_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "EFFORT", 2 * 10**7)
    chain = llama_chain("0.3B", layers=3)
    plan = with_places(random_plan(chain, random.Random(5)), chain)
    program, chance = compile_program(plan, chain), random.Random(0)
    noticed = 0
    for _ in range(40):
        moved, other = chance.sample(range(len(plan.offsets)), 2)
        offsets = list(plan.offsets)
        offsets[moved] = offsets[other]
        spans = Spans(program, chain).spans
        if wrong(spans, offsets, moved):
            with pytest.raises(InvalidProgram):
                verify(program, chain, gpu_budget_bytes=2**50, offsets=offsets)
            noticed += 1
        else:
            verify(program, chain, gpu_budget_bytes=2**50, offsets=offsets)
    assert noticed > 10


def wrong(spans: list[Span], offsets: list[int], moved: int) -> bool:
    """Whether a span lies on another one."""
    own, at = spans[moved], offsets[moved]
    return any(
        packing._meet(own, other) and at < offset + other.bytes and offset < at + own.bytes
        for number, (other, offset) in enumerate(zip(spans, offsets, strict=True))
        if number != moved
    )


def test_places_for_fewer_tensors_than_there_are_are_refused() -> None:
    chain = llama_chain("0.3B", layers=3)
    plan = with_places(random_plan(chain, random.Random(1)), chain)
    with pytest.raises(InvalidProgram, match="places for"):
        verify(compile_program(plan, chain), chain, gpu_budget_bytes=2**50, offsets=plan.offsets[:-1])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("clip", [False, True], ids=["free", "clipped"])
def test_the_least_budget_has_a_plan_whose_tensors_have_places_within_it(
    clip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "EFFORT", 2 * 10**7)
    chain = llama_chain("0.3B", layers=3)
    budgets = {"cpu_budget_bytes": 2**42, "slices": 2, "clip": clip}
    least = Problem(chain=chain, hardware=machine(), gpu_budget_bytes=0, **budgets).least().gpu_bytes
    for gpu in (least, least + least // 5):
        plan = Problem(chain=chain, hardware=machine(), gpu_budget_bytes=gpu, **budgets).plan()
        assert plan.gpu_peak_bytes <= plan.gpu_budget_bytes == gpu
        verify(compile_program(plan, chain), chain, gpu_budget_bytes=gpu, offsets=plan.offsets)
    with pytest.raises(UserError, match="No schedule fits"):
        Problem(chain=chain, hardware=machine(), gpu_budget_bytes=int(0.97 * least), **budgets).plan()
