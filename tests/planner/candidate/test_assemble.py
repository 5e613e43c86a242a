"""Schedules, and the stages of a plan that they end up in."""

from __future__ import annotations

from planner.candidate.candidate import Absence, Candidate, Side, TensorSchedule, assemble, at_home
from planner.candidate.setting import Budgets, Setting
from planner.greedy.streaming import profile, resident, streamed
from tests.support import chains as small


def test_an_absence_around_the_end_of_the_step_is_not_resident() -> None:
    chain = small.chain(2)
    tensor = chain.blocks[1].tensors[0]
    home = [at_home(chain, t, False) for t in chain.tensors() if t.name != tensor.name]
    schedule = TensorSchedule(
        tensor=tensor,
        side=Side.CPU,
        send=5,
        drop=6,
        update=6,
        weight=(Absence(evict=1, prefetch=4), Absence(evict=5, prefetch=0)),
    )
    candidate = Candidate(options=("keep",) * 4, schedules=(*home, schedule), source="test")
    plan = assemble(chain, candidate, slices=1, clip=False)
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
    candidate = streamed(s, profile(s, "recompute"), ahead=True, source="test")
    plan = assemble(s.chain, candidate, slices=1, clip=False)
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
    assert [str(stage) for stage in plan.stages][
        -1
    ] == "B0 evict=g:e,g:l0.a,g:l0.b,g:l1.a,g:l1.b,g:h gpu=e,l0.a,l0.b,l1.a,l1.b,h"
