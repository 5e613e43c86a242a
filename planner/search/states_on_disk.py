"""Which optimizer states are on disk, where the host's memory is too small for all: they are read, updated and written
again in every step. That takes time and wears a drive: as few as are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.candidate.candidate import movable
from planner.errors import Exit, UserError
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.schedule.state_pieces import stored_bytes
from planner.search.problem import Problem
from planner.units import format_bytes, format_bytes_down

PIECE_ELEMENTS = 16 * 2**20
"""192 MiB of states: a drive is at its full rate with much less, but each piece is three operations of the program."""
LEAST_BYTES = 2**20
PARTS = 16


def with_states_on_disk(problem: Problem) -> Problem:
    """The problem as it is where no disk is given, where a plan keeps its budgets, or where none does with all states
    on disk; else with as many of them there as are needed, in sixteenths, spread evenly over the tensors."""
    names = _may_be_on_disk(problem)
    if not problem.hardware.disk_bytes or not names or problem.fits():
        return problem
    return as_few_as_fit(problem, lambda parts: _on_disk(problem, names, parts))


def as_few_as_fit(problem: Problem, with_parts: Callable[[int], Problem]) -> Problem:
    """`with_parts` of the fewest sixteenths of what may be on disk that have a plan; `problem` where all have none."""
    low, high = 0, PARTS
    if not (best := with_parts(high)).fits():
        return problem
    while high - low > 1:
        middle = (low + high) // 2
        tried = with_parts(middle)
        if tried.fits():
            best, high = tried, middle
        else:
            low = middle
    return best


def states_on_disk(chain: Chain) -> bool:
    """Whether any may be there."""
    return any(t.states_on_disk for t in chain.tensors())


def disk_need_bytes(plan: Plan, chain: Chain, *, homes: int) -> int:
    """What states on disk take there: those of the tensors that the CPU updates."""
    there = [t for t in chain.tensors() if t.states_on_disk and t.name in plan.cpu_updated()]
    return stored_bytes((piece for t in there for piece in chain.state_pieces(t)), homes)


def check_disk_budget(need_bytes: int, budget_bytes: int | None, *, homes: int) -> None:
    """Raise UserError "disk-too-small" where the budget is less. `homes`: places that each state has there."""
    if budget_bytes is not None and need_bytes > budget_bytes:
        raise UserError(
            "The disk budget has no room for the optimizer states.", code="disk-too-small",
            numbers=(f"disk_budget {format_bytes_down(budget_bytes)}, needed {format_bytes(need_bytes)}",),
            hint="give a larger disk_budget or cpu_budget"
            + ("; or save_total_limit: 2, with half of it there and copies in checkpoints" if homes == 2 else ""),
            exit_code=Exit.DOES_NOT_FIT,
        )  # fmt: skip


def _may_be_on_disk(problem: Problem) -> list[str]:
    """What the CPU may update; small ones would take a drive nearly as long as large ones."""
    tensors = movable(problem.chain, replace(problem.hardware, min_transfer_bytes=0))
    return [t.name for block in tensors for t in block if t.trainable and t.state_bytes >= LEAST_BYTES]


def _on_disk(problem: Problem, names: list[str], parts: int) -> Problem:
    chosen = {name for k, name in enumerate(names) if (k + 1) * parts // PARTS > k * parts // PARTS}
    blocks = tuple(
        replace(
            block, tensors=tuple(replace(t, states_on_disk=True) if t.name in chosen else t for t in block.tensors)
        )
        for block in problem.chain.blocks
    )  # fmt: skip
    return replace(problem, chain=replace(problem.chain, blocks=blocks, piece_elements=PIECE_ELEMENTS))
