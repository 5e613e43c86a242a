"""Decides which frozen weights the host keeps no copy of, so that they are read from disk.

This is done where the host's memory is too small for all weights, or is better used for activations. Weights without a
copy are read from the model's own files in each forward and backward pass, which costs nothing but time. Nothing is
written, and the job need not ask for it.
"""

from __future__ import annotations

from dataclasses import replace

from planner.candidate.candidate import movable
from planner.garbage import seldom_collected
from planner.schedule.chain import Chain
from planner.search.activations_on_disk import with_states_and_activations_on_disk
from planner.search.problem import Problem
from planner.search.states_on_disk import PARTS, as_few_as_fit, every, with_all_on_disk

_WORTH = 0.02  # of a step: where the gain is less, weights stay in memory
_LEAST_BYTES = 2**20  # a disk takes nearly as long for a smaller tensor


@seldom_collected()
def with_disk(problem: Problem) -> Problem:
    """Return the planner's problem with all decisions about disks made: which frozen weights are read from the model's
    files and, where the job gives a disk, which optimizer states, activations and trained weights are on it."""
    return with_states_and_activations_on_disk(with_weights_on_disk(problem))


def with_all_that_may_be_on_disk(problem: Problem) -> Problem:
    """Return the planner's problem as it needs the least memory: unchanged where a plan fits the budgets; else with all
    on disk that can be there. Which of it should be there is not decided, so this is fast."""
    if problem.fits():
        return problem
    stored = with_all_on_disk(problem) if problem.hardware.disk_bytes else problem
    return _on_disk(stored, _may_be_on_disk(stored))


def with_weights_on_disk(problem: Problem) -> Problem:
    """Return the planner's problem with some of the layers' frozen weights on disk. Where a plan fits the budgets only
    so, as few of them as possible are there, in 256ths, spread evenly over the layers. Where half or all of them on
    disk let the integer program find a shorter step, because host memory becomes free, so many are there.

    The problem is returned unchanged where none of this is needed or helps, and where no plan fits the budgets even
    with all of these weights on disk.
    """
    if not may_be_read(problem):
        return problem
    names = _may_be_on_disk(problem)
    best = problem
    if not problem.fits():
        best = as_few_as_fit(problem, lambda parts: _on_disk(problem, every(names, parts)))
        if best is problem:
            return problem
    best_s = best.hope_s()
    if not best.more_host_may_help((1 - _WORTH) * best_s):
        return best
    for parts in (PARTS // 2, PARTS):
        tried = _on_disk(problem, every(names, parts))
        worth_s = (1 - _WORTH) * best_s
        if tried.fits() and (hope_s := tried.hope_s(below_s=worth_s)) < worth_s:
            best, best_s = tried, hope_s
    return best


def may_be_read(problem: Problem) -> bool:
    """Return whether reading frozen weights from disk might help: some can be on disk, and the host has no memory for
    everything that may leave the device, activations included."""
    weights = sum(t.bytes + t.state_bytes + t.gradient_bytes for t in problem.chain.tensors())
    activations = sum(max(option.offloaded_bytes for option in block.options) for block in problem.chain.blocks)
    return weights + problem.slices * activations > problem.cpu_budget_bytes and bool(_may_be_on_disk(problem))


def disk_bytes(chain: Chain) -> int:
    """Return the bytes of the frozen weights that are on disk."""
    return sum(t.bytes for t in chain.tensors() if t.on_disk and not t.trainable)


def _may_be_on_disk(problem: Problem) -> list[str]:
    """Return the names of the layers' frozen weights that can be on disk: those that the model's files have in the form
    that the job uses. Embedding and head are left out: each is as large as many such weights, and the buffers through
    which it would be read would be as large, too."""
    layers = movable(problem.chain, problem.hardware)[1:-1] if problem.not_in_files is None else ()
    return [t.name for tensors in layers for t in tensors if not t.trainable and t.bytes >= _LEAST_BYTES]


def _on_disk(problem: Problem, names: list[str]) -> Problem:
    chosen = frozenset(names)
    blocks = tuple(
        replace(block, tensors=tuple(replace(t, on_disk=True) if t.name in chosen else t for t in block.tensors))
        for block in problem.chain.blocks
    )
    return replace(problem, chain=replace(problem.chain, blocks=blocks))
