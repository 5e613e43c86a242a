"""Decides which optimizer states are on disk, where the host's memory is too small for all of them.

States on disk are read, updated and written again in every step. The integer program decides how many they are and
which: this also frees host memory for activations.
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
"""Elements of a tensor whose states are read and written at once: 48 MiB of states. With this size a drive reaches its
full rate, and the buffers take little host memory."""
PARTS = 256


def with_states_on_disk(problem: Problem) -> Problem:
    """Return the problem with some optimizer states on disk: those for which the planner's integer program finds the
    shortest step, as far as the disk has room.

    Where no plan fits then, as few more states as needed are put on disk, even beyond its room: their size tells the
    user how much room is needed. Where even all states on disk are not enough, as few weights as needed are kept wholly
    on disk, too. The problem is returned unchanged where it has no disk, where a plan fits without a disk, and where
    none fits even with all on disk that can be there.
    """
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
    """Return the seconds of the shortest step that the planner's integer program finds when it also chooses which
    optimizer states are on disk; infinity where it finds none."""
    everything = _all_that_may_help(problem)
    if everything is None:
        return problem.hope_s()
    solution = everything.hoped(states_anywhere=True) if everything.fits() else None
    return solution.step_s if solution else math.inf


def _all_that_may_help(problem: Problem) -> Problem | None:
    """Return the problem with all states on disk that can be there; None where none can be there or none needs to
    be."""
    names = _may_be_on_disk(problem)
    return _on_disk(problem, names) if problem.hardware.disk_bytes and names and not problem.fits() else None


def decided_anew(problem: Problem) -> Problem:
    """Return the planner's problem with the choice of optimizer states on disk made again, because the problem has
    changed since. A problem without states on disk is returned unchanged."""
    return with_states_on_disk(_on_disk(problem, ())) if states_on_disk(problem.chain) else problem


def with_weights_wholly_on_disk(everything: Problem, otherwise: Problem) -> Problem:
    """Return the planner's problem `everything`, which has all optimizer states on disk, with as few of the layers'
    weights wholly on disk as a plan needs to fit the budgets; `otherwise` where none fits even so."""
    names = _may_be_wholly_on_disk(everything)
    if not (names and everything.cpu_updates):
        return otherwise
    found = as_few_as_fit(everything, lambda parts: _wholly_on_disk(everything, every(names, parts)))
    return otherwise if found is everything else found


def with_all_on_disk(problem: Problem) -> Problem:
    """Return the planner's problem with all optimizer states on disk that can be there and, where a disk is given, have
    room on it. Where no plan fits even so, all weights that can be wholly on disk are there, too."""
    names = _may_be_on_disk(problem)
    everything = _on_disk(problem, names)
    if not everything.fits() and (more := _may_be_wholly_on_disk(everything)):
        return _wholly_on_disk(everything, more)
    return _on_disk(problem, _with_room(everything, names)) if problem.hardware.disk_bytes else everything


def every(names: Sequence[str], parts: int) -> list[str]:
    """Return `parts` 256ths of the names, spread evenly over the list: every second name for 128."""
    return [name for k, name in enumerate(names) if (k + 1) * parts // PARTS > k * parts // PARTS]


def _fastest(everything: Problem) -> list[str]:
    """Return the names of the tensors whose states the integer program puts on disk when any can be there. For the
    embedding and the head this follows its choice; the layers have together as many bytes on disk as it chooses, and
    each layer gets the same share. The difference from rounding to whole tensors is passed on, from blocks of large
    tensors to those of small ones.

    The integer program does not care which layers the states belong to. If they were those of consecutive layers, the
    drive would first wait for the CPU, and then the CPU for the drive, longer than the buffers can even out.
    """
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
    """Return those of the named tensors, taken in order, whose states have room on disk. Whole tensors may need a
    little more room than the integer program's fractions."""
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
    """Return `with_parts(parts)` for the smallest `parts` from 1 to 256 for which there is a plan, found by bisection;
    `problem` where there is none even for 256. `with_parts` returns the planner's problem with so many 256ths of
    something on disk. Plans are looked for only in the number of rounds that needs the least memory when all 256 are
    there."""
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
    """Return whether there are tensors whose optimizer states are on disk when the CPU updates them."""
    return any(t.states_on_disk for t in chain.tensors())


def disk_need_bytes(plan: Plan, chain: Chain, *, homes: int) -> int:
    """Return the bytes that a plan needs on disk for the tensors that the CPU updates: their states, and the weights
    that are wholly on disk. `homes`: how many copies of each state are kept there (`Job.state_homes`)."""
    updated = plan.cpu_updated()
    there = [t for t in chain.tensors() if t.states_on_disk and t.name in updated]
    states = stored_bytes((piece for t in there for piece in chain.state_pieces(t)), homes)
    return states + chain.passing_bytes(updated)


def check_disk_budget(need_bytes: int, budget_bytes: int | None, *, homes: int) -> None:
    """Raise UserError "disk-too-small" if the disk budget is less than `need_bytes`; a budget of None never is.
    `homes`: how many copies of each optimizer state are kept on disk (`Job.state_homes`), for the hint."""
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
    """Return the names of the tensors whose states can be on disk: those that the CPU may update, without small ones,
    for which a drive takes nearly as long as for large ones."""
    return [t.name for block in _movable(problem) for t in block if t.storable]


def _movable(problem: Problem) -> list[list[Tensor]]:
    return movable(problem.chain, replace(problem.hardware, min_transfer_bytes=0))


def _on_disk(problem: Problem, names: Collection[str]) -> Problem:
    chosen = frozenset(names)
    return _changed(problem, lambda t: t.with_states(on_disk=t.name in chosen))


def _may_be_wholly_on_disk(problem: Problem) -> list[str]:
    """Return the names of the layers' weights that can be wholly on disk: those with states on disk, of a model whose
    loading does not need memory for all weights. Embedding and head are left out: each is as large as many such
    weights, and the buffers through which it would be read would be as large, too."""
    layers = _movable(problem)[1:-1] if problem.not_in_files is None else ()
    return [t.name for tensors in layers for t in tensors if t.states_on_disk and t.has_master]


def _wholly_on_disk(problem: Problem, names: Collection[str]) -> Problem:
    chosen = frozenset(names)
    return _changed(problem, lambda t: replace(t, on_disk=True) if t.name in chosen else t)


def _changed(problem: Problem, of: Callable[[Tensor], Tensor]) -> Problem:
    blocks = tuple(replace(block, tensors=tuple(map(of, block.tensors))) for block in problem.chain.blocks)
    return replace(problem, chain=replace(problem.chain, blocks=blocks, piece_elements=PIECE_ELEMENTS))
