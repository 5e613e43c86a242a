"""Bytes handed out to whole tensors, and the stages they end up in."""

from __future__ import annotations

from planner.draft.draft import Draft, Journey, Side, Trip, assemble, at_home
from planner.draft.setting import Budgets, Setting
from planner.greedy.streaming import profile, resident, streamed
from planner.search.place_transfers import Job, hand_out
from tests.support import chains as small


def job(name: str, size: int, release: int, deadline: int) -> Job:
    return Job(name=name, size=size, release=release, deadline=deadline)


def test_what_leaves_leaves_at_least_as_early_as_the_amounts() -> None:
    jobs = [job("a", 10, 0, 9), job("b", 10, 0, 9)]
    assert hand_out([5, 0, 6, 9], jobs, eager=True) == {"a": 0, "b": 2}


def test_what_comes_comes_at_most_as_early_as_the_amounts() -> None:
    jobs = [job("a", 10, 0, 9), job("b", 10, 0, 9)]
    assert hand_out([5, 6, 0, 9], jobs, eager=False) == {"a": 1, "b": 3}


def test_the_earliest_deadline_goes_first() -> None:
    jobs = [job("late", 10, 0, 9), job("soon", 10, 0, 2)]
    assert hand_out([10, 10], jobs, eager=True) == {"soon": 0, "late": 1}


def test_what_waited_is_sent_before_what_the_running_block_makes() -> None:
    jobs = [job("new", 10, 1, 3), job("old", 10, 0, 9)]
    assert hand_out([0, 10, 10], jobs, eager=True, new_last=True) == {"old": 1, "new": 2}
    assert hand_out([0, 10, 10], jobs, eager=True) == {"new": 1, "old": 2}


def test_at_its_deadline_a_tensor_moves_in_any_case() -> None:
    assert hand_out([0, 0, 0], [job("a", 10, 0, 1)], eager=False) == {"a": 1}
    assert hand_out([], [job("a", 10, 3, 4)], eager=True) == {"a": 4}


def test_a_solvers_rounding_error_delays_nobody() -> None:
    assert hand_out([9.999999, 0], [job("a", 10, 0, 1)], eager=False) == {"a": 0}


def test_an_absence_around_the_end_of_the_step_is_not_resident() -> None:
    chain = small.chain(2)
    tensor = chain.blocks[1].tensors[0]
    home = [at_home(chain, t, False) for t in chain.tensors() if t.name != tensor.name]
    journey = Journey(
        tensor=tensor, side=Side.CPU, send=5, drop=6, update=6,
        weight=(Trip(evict=1, prefetch=4), Trip(evict=5, prefetch=0)),
    )  # fmt: skip
    draft = Draft(options=("keep",) * 4, journeys=(*home, journey), source="test")
    plan = assemble(chain, draft, slices=1, clip=False)
    assert [str(s) for s in plan.stages] == [
        "F0 prefetch=w:l0.a",
        "F1 evict=w:l0.a",
        "F2",
        "H3 evict=g:h gpu=h",
        "B2 prefetch=w:l0.a evict=g:l1.a,g:l1.b gpu=l1.a,l1.b",
        "B1 offload=g:l0.a evict=g:l0.b,w:l0.a gpu=l0.b",
        "B0 evict=g:e,g:l0.a cpu=l0.a gpu=e",
    ]
    assert set(plan.resident) == {f"{kind}:{name}" for kind in "ws" for name in ("e", "l0.b", "l1.a", "l1.b", "h")}


def setting(clip: bool = False) -> Setting:
    budgets = Budgets(gpu_bytes=10**6, cpu_bytes=10**6)
    return Setting(chain=small.chain(2), hardware=small.HARDWARE, budgets=budgets, slices=1, clip=clip)


def test_the_streamed_plan_fetches_a_stage_ahead_and_updates_on_the_cpu() -> None:
    s = setting()
    draft = streamed(s, profile(s, "recompute"), ahead=True, source="test")
    plan = assemble(s.chain, draft, slices=1, clip=False)
    assert plan.options == ("keep", "recompute", "recompute", "keep")
    assert [str(stage) for stage in plan.stages] == [
        "F0 prefetch=w:l0.a,w:l0.b evict=w:e",
        "F1 prefetch=w:l1.a,w:l1.b evict=w:l0.a,w:l0.b",
        "F2 prefetch=w:h",
        "H3 offload=g:h evict=w:h",
        "B2 prefetch=w:l0.a,w:l0.b offload=g:l1.a,g:l1.b evict=g:h,w:l1.a,w:l1.b cpu=h",
        "B1 prefetch=w:e,s:e offload=g:l0.a,g:l0.b evict=g:l1.a,g:l1.b,w:l0.a,w:l0.b cpu=l1.a,l1.b",
        "B0 offload=w:e,s:e evict=g:e,g:l0.a,g:l0.b,s:e cpu=l0.a,l0.b gpu=e",
    ]
    assert plan.resident == ("w:e",)


def test_the_resident_plan_moves_nothing() -> None:
    s = setting(clip=True)
    plan = assemble(s.chain, resident(s, profile(s, "fast"), "test"), slices=1, clip=True)
    assert not any(stage.prefetch or stage.offload or stage.cpu_update for stage in plan.stages)
    assert [str(stage) for stage in plan.stages][-1] == "B0 evict=g:e,g:l0.a,g:l0.b,g:l1.a,g:l1.b,g:h " \
        "gpu=e,l0.a,l0.b,l1.a,l1.b,h"  # fmt: skip
