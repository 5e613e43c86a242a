"""Decides which optimizer states are on disk, where the host's memory is too small for all.

They are read, updated and written again in every step. The solver decides which and how many: states on disk leave
host memory for activations, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from planner.candidate.candidate import movable
from planner.errors import Exit, UserError
from planner.ilp.instance import tensor_lists
from planner.schedule.chain import Chain, Tensor
from planner.schedule.plan import Plan
from planner.schedule.state_pieces import stored_bytes
from planner.search.make_plan import rounds_of_least
from planner.search.problem import Problem
from planner.search.round_placements import Carry
from planner.units import format_bytes, format_bytes_down

PIECE_ELEMENTS = 4 * 2**20
"""48 MiB of states: a drive is at its full rate with that, and what the ring takes of the host's memory is on disk."""
PARTS = 256


def with_states_on_disk(problem: Problem) -> Problem:
    """The problem with those states on disk with which the solver hopes for the shortest step, as far as they have room
    there. Where a plan needs more states on disk, it gets as few as it needs; their size tells how much room there
    should be. Where all states on disk are not enough, as few weights as needed are wholly on disk, too.

    The problem is returned as it is where no disk is given, where a plan keeps its budgets without one, and where none
    does with all on disk that may be."""
    everything = _all_that_may_help(problem)
    if everything is None:
        return problem
    if not everything.fits():
        return with_weights_wholly_on_disk(everything, problem)
    names = _may_be_on_disk(problem)
    chosen = _with_room(everything, _fastest(everything))
    found = _on_disk(problem, chosen)
    if found.fits():
        return found
    others = [name for name in names if name not in chosen]
    more = as_few_as_fit(problem, lambda parts: _on_disk(problem, [*chosen, *every(others, parts)]))
    if _stored_bytes(more, names) <= problem.hardware.disk_bytes:
        return more
    return as_few_as_fit(problem, lambda parts: _on_disk(problem, every(names, parts)))


def hope_s(problem: Problem) -> float:
    """Seconds of the solver's step, before rounding, with the states on disk that the solver chooses; infinity where it
    finds no step."""
    everything = _all_that_may_help(problem)
    if everything is None:
        return problem.hope_s()
    solution = everything.hoped(states_anywhere=True) if everything.fits() else None
    return solution.step_s if solution else math.inf


def _all_that_may_help(problem: Problem) -> Problem | None:
    """The problem with all states on disk that may be there; None where none may or needs to be there."""
    names = _may_be_on_disk(problem)
    return _on_disk(problem, names) if problem.hardware.disk_bytes and names and not problem.fits() else None


def decided_anew(problem: Problem) -> Problem:
    """The problem with the choice of states on disk made again, where it has any: for one that was changed since."""
    return with_states_on_disk(_on_disk(problem, ())) if states_on_disk(problem.chain) else problem


def with_weights_wholly_on_disk(everything: Problem, otherwise: Problem) -> Problem:
    """The problem with all states on disk, and with as few of the layers' weights wholly on disk as a plan needs to
    keep its budgets; `otherwise` where no plan does."""
    names = _may_be_wholly_on_disk(everything)
    if not (names and everything.cpu_updates):
        return otherwise
    found = as_few_as_fit(everything, lambda parts: _wholly_on_disk(everything, every(names, parts)))
    return otherwise if found is everything else found


def with_all_on_disk(problem: Problem) -> Problem:
    """The problem with all states on disk that may be there, where a disk is given only those that have room on it.
    Where all states are not enough, all weights that may be wholly on disk are there, too."""
    names = _may_be_on_disk(problem)
    everything = _on_disk(problem, names)
    if not everything.fits() and (more := _may_be_wholly_on_disk(everything)):
        return _wholly_on_disk(everything, more)
    return _on_disk(problem, _with_room(everything, names)) if problem.hardware.disk_bytes else everything


def every(names: Sequence[str], parts: int) -> list[str]:
    """`parts` 256ths of the names, spread evenly."""
    return [name for k, name in enumerate(names) if (k + 1) * parts // PARTS > k * parts // PARTS]


def _fastest(everything: Problem) -> list[str]:
    """The tensors whose states the solver puts on disk when any may be there. Embedding and head are as it says; layers
    have as much in all as it says. What rounding gives too much or too little is passed on, from blocks of large
    tensors to those of small ones.

    The solver does not care which layers the states belong to. If they were those of some layers in a row, the drive
    would wait for the CPU, and then the CPU for the drive, longer than the ring can even out. So each layer gets its
    share."""
    solution = everything.hoped(states_anywhere=True)
    if solution is None:
        return []
    trainable, _ = tensor_lists(everything.chain, everything.hardware)
    may = [[t for t in tensors if t.states_on_disk] for tensors in trainable]
    stored, updated = (list(solution.totals.of[kind]) for kind in "VX")
    layers = [i for i, tensors in enumerate(trainable) if len(tensors) > 1]
    share = sum(stored[i] for i in layers) / max(1.0, sum(updated[i] for i in layers))
    for i in layers:
        stored[i] = share * updated[i]
    carry = Carry({"V": 0.0}, up=True)
    found: list[str] = []
    for i in sorted(range(len(may)), key=lambda i: -max((t.bytes for t in may[i]), default=0)):
        found += [t.name for t in carry.take("V", may[i], stored[i], lambda t: t.bytes)]
    return found


def _with_room(problem: Problem, names: Sequence[str]) -> list[str]:
    """Those of the named tensors, taken in order, whose states have room on disk: whole tensors may take a little more
    than the solver found room for."""
    left, found = problem.hardware.disk_bytes, []
    for name in names:
        if (size := _stored_bytes(problem, [name])) <= left:
            found.append(name)
            left -= size
    return found


def _stored_bytes(problem: Problem, names: Collection[str]) -> int:
    chain = problem.chain
    there = (t for t in chain.tensors() if t.states_on_disk and t.name in names)
    return stored_bytes((piece for t in there for piece in chain.state_pieces(t)), homes=1)


def as_few_as_fit(problem: Problem, with_parts: Callable[[int], Problem]) -> Problem:
    """`with_parts` of the fewest 256ths on disk for which there is a plan; `problem` where there is none even for all
    256. Rounds are as many as take the least memory when all is on disk."""
    low, high = 0, PARTS
    best = with_parts(high)
    rounds = rounds_of_least(best.setting)
    if rounds is None or not best.fits(rounds):
        return problem
    while high - low > 1:
        middle = (low + high) // 2
        tried = with_parts(middle)
        if tried.fits(rounds):
            best, high = tried, middle
        else:
            low = middle
    return best


def states_on_disk(chain: Chain) -> bool:
    """Whether any states may be on disk."""
    return any(t.states_on_disk for t in chain.tensors())


def disk_need_bytes(plan: Plan, chain: Chain, *, homes: int) -> int:
    """Bytes on disk of states, and of weights wholly on disk, of the tensors that the CPU updates. `homes`: places that
    each piece of states has there."""
    updated = plan.cpu_updated()
    there = [t for t in chain.tensors() if t.states_on_disk and t.name in updated]
    states = stored_bytes((piece for t in there for piece in chain.state_pieces(t)), homes)
    return states + chain.passing_bytes(updated)


def check_disk_budget(need_bytes: int, budget_bytes: int | None, *, homes: int) -> None:
    """Raise UserError "disk-too-small" where the budget is less than the need. `homes`: places that each piece of
    states has on disk."""
    if budget_bytes is not None and need_bytes > budget_bytes:
        raise UserError(
            "The disk budget has no room for what goes to disk.",
            code="disk-too-small",
            numbers=(f"disk_budget {format_bytes_down(budget_bytes)}, needed {format_bytes(need_bytes)}",),
            hint="give a larger disk_budget or cpu_budget"
            + ("; or save_total_limit: 2, with half of it there and copies in checkpoints" if homes == 2 else ""),
            exit_code=Exit.DOES_NOT_FIT,
        )


def _may_be_on_disk(problem: Problem) -> list[str]:
    """Names of the tensors whose states may be on disk: those that the CPU may update, but for small ones, for which a
    drive would take nearly as long as for large ones."""
    return [t.name for block in _movable(problem) for t in block if t.storable]


def _movable(problem: Problem) -> list[list[Tensor]]:
    return movable(problem.chain, replace(problem.hardware, min_transfer_bytes=0))


def _on_disk(problem: Problem, names: Collection[str]) -> Problem:
    chosen = frozenset(names)
    return _changed(problem, lambda t: t.with_states(on_disk=t.name in chosen))


def _may_be_wholly_on_disk(problem: Problem) -> list[str]:
    """Names of the layers' weights with states on disk, where loading needs no memory for all weights. Embedding and
    head are left out: each is as large as many such weights, and the slots that it came through would be, too."""
    layers = _movable(problem)[1:-1] if problem.not_in_files is None else ()
    return [t.name for tensors in layers for t in tensors if t.states_on_disk and t.has_master]


def _wholly_on_disk(problem: Problem, names: Collection[str]) -> Problem:
    chosen = frozenset(names)
    return _changed(problem, lambda t: replace(t, on_disk=True) if t.name in chosen else t)


def _changed(problem: Problem, of: Callable[[Tensor], Tensor]) -> Problem:
    blocks = tuple(replace(block, tensors=tuple(map(of, block.tensors))) for block in problem.chain.blocks)
    return replace(problem, chain=replace(problem.chain, blocks=blocks, piece_elements=PIECE_ELEMENTS))
