"""Which frozen weights the host keeps no copy of, where its memory is too small for all, or is of more use for
activations: they are read from the model's own files in each pass, which costs nothing but time. Nothing is written,
and nobody needs to ask for it.
"""

from __future__ import annotations

from dataclasses import replace

from planner.candidate.candidate import movable
from planner.schedule.chain import Chain
from planner.search.activations_on_disk import with_states_and_activations_on_disk
from planner.search.garbage import seldom_collected
from planner.search.problem import Problem
from planner.search.states_on_disk import PARTS, as_few_as_fit, every

_WORTH = 0.02  # of a step: what gains less is in memory
_LEAST_BYTES = 2**20  # what is smaller takes a disk nearly as long


@seldom_collected()
def with_disk(problem: Problem) -> Problem:
    """The problem with what is read from disk: frozen weights, and where a disk is given for them optimizer states,
    activations and trained weights."""
    return with_states_and_activations_on_disk(with_weights_on_disk(problem))


def with_weights_on_disk(problem: Problem) -> Problem:
    """The problem as it is where a plan keeps its budgets and the solver hopes for no shorter step otherwise, or where
    no plan does with all that may be on disk. Else with as many of the layers' frozen weights on disk as are needed, in
    256ths, spread evenly over the layers; or with half or all of them, for what else then has room on the host."""
    if not may_be_read(problem):
        return problem
    names = _may_be_on_disk(problem)
    best = problem
    if not problem.fits():
        best = as_few_as_fit(problem, lambda parts: _on_disk(problem, every(names, parts)))
        if best is problem:
            return problem
    best_s = best.hope_s()
    for parts in (PARTS // 2, PARTS):
        tried = _on_disk(problem, every(names, parts))
        if tried.fits() and (hope_s := tried.hope_s()) < (1 - _WORTH) * best_s:
            best, best_s = tried, hope_s
    return best


def may_be_read(problem: Problem) -> bool:
    """Whether it might help that frozen weights are read: there are some, and the host has not memory for all that may
    leave the device, activations with it."""
    weights = sum(t.bytes + t.state_bytes + t.gradient_bytes for t in problem.chain.tensors())
    activations = sum(max(option.offloaded_bytes for option in block.options) for block in problem.chain.blocks)
    return weights + problem.slices * activations > problem.cpu_budget_bytes and bool(_may_be_on_disk(problem))


def disk_bytes(chain: Chain) -> int:
    """Of the frozen weights that are on disk."""
    return sum(t.bytes for t in chain.tensors() if t.on_disk and not t.trainable)


def _may_be_on_disk(problem: Problem) -> list[str]:
    """Frozen weights of layers, where the model's files have them as they are. The embedding and the head are as large
    as many of those, and so would the slots be through which they came."""
    layers = movable(problem.chain, problem.hardware)[1:-1] if problem.not_in_files is None else ()
    return [t.name for tensors in layers for t in tensors if not t.trainable and t.bytes >= _LEAST_BYTES]


def _on_disk(problem: Problem, names: list[str]) -> Problem:
    chosen = frozenset(names)
    blocks = tuple(
        replace(block, tensors=tuple(replace(t, on_disk=True) if t.name in chosen else t for t in block.tensors))
        for block in problem.chain.blocks
    )
    return replace(problem, chain=replace(problem.chain, blocks=blocks))
