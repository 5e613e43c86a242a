"""Which frozen weights the host keeps no copy of, where its memory is too small for all: they are read from the model's
own files in each pass, which costs nothing but time. Nothing is written, and nobody needs to ask for it.
"""

from __future__ import annotations

from dataclasses import replace

from planner.candidate.candidate import movable
from planner.schedule.chain import Chain
from planner.search.problem import Problem
from planner.search.states_on_disk import as_few_as_fit, every, with_states_on_disk

_LEAST_BYTES = 2**20  # what is smaller takes a disk nearly as long


def with_disk(problem: Problem, *, weights_in_files: bool) -> Problem:
    """The problem with what is read from disk: frozen weights where the model's files have them as they are, and
    optimizer states where a disk is given for them."""
    return with_states_on_disk(with_weights_on_disk(problem) if weights_in_files else problem)


def with_weights_on_disk(problem: Problem) -> Problem:
    """The problem as it is where a plan keeps its budgets, or where none does with all that may be on disk; else with
    as many of the layers' frozen weights on disk as are needed, in 256ths, spread evenly over the layers."""
    names = _may_be_on_disk(problem)
    if not names or _fits_anyway(problem) or problem.fits():
        return problem
    return as_few_as_fit(problem, lambda parts: _on_disk(problem, every(names, parts)))


def disk_bytes(chain: Chain) -> int:
    """Of the weights that are on disk."""
    return sum(t.bytes for t in chain.tensors() if t.on_disk)


def _may_be_on_disk(problem: Problem) -> list[str]:
    """Frozen weights of layers. The embedding and the head are as large as many of those, and so would the slots be
    through which they came."""
    layers = movable(problem.chain, problem.hardware)[1:-1]
    return [t.name for tensors in layers for t in tensors if not t.trainable and t.bytes >= _LEAST_BYTES]


def _fits_anyway(problem: Problem) -> bool:
    """The host has memory for everything that might leave the device but activations, which need not."""
    total = sum(t.bytes + t.state_bytes + t.gradient_bytes for t in problem.chain.tensors())
    return total <= problem.cpu_budget_bytes


def _on_disk(problem: Problem, names: list[str]) -> Problem:
    chosen = frozenset(names)
    blocks = tuple(
        replace(block, tensors=tuple(replace(t, on_disk=True) if t.name in chosen else t for t in block.tensors))
        for block in problem.chain.blocks
    )
    return replace(problem, chain=replace(problem.chain, blocks=blocks))
