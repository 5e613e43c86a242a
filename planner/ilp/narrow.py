"""Reduces the options of the integer program to those that its linear relaxation uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pulp

from planner.candidate.setting import Setting
from planner.ilp.columns import Columns
from planner.ilp.instance import Instance, make_instance
from planner.ilp.program import build
from planner.ilp.solver import solve
from planner.ilp.stored_rows import price_of_writing

_ENOUGH = 6
"""A block with at most so many options keeps them all: the integer program then takes no longer than its relaxation."""
_USED = 0.01  # share of a block: a smaller one is the solver's rounding


def narrowed(setting: Setting, *always: Sequence[str]) -> tuple[Setting, float]:
    """The same planning problem with fewer options per block, and a lower bound in seconds on the integer program's
    step (0: none is known; about one, if activations may go to disk). Blocks of each kind keep the options that the
    linear relaxation of the integer program uses, even in part, for any block of that kind, and those in `always`,
    lists of one option name per block.

    The relaxation may mix options within a block, so an option that it does not use is not needed if each block must
    have one. The setting is returned unchanged if no block has more than six options, or if the relaxation finds no
    solution.
    """
    chain = setting.chain
    if max(len(setting.options(block)) for block in chain.blocks) <= _ENOUGH:
        return setting, 0.0
    instance = make_instance(setting)
    relaxed = _relaxed(instance)
    if relaxed is None:
        return setting, 0.0
    used: dict[str, set[str]] = {}
    for index, block in enumerate(chain.blocks):
        names = used.setdefault(block.kind, set())
        names.update(options[index] for options in always)
        shares = zip(instance.choices[index], relaxed.comp[index], strict=True)
        names.update(block.options[choice.index].name for choice, x in shares if (x.value() or 0.0) > _USED)
    blocks = tuple(
        replace(block, options=tuple(o for o in block.options if o.name in used[block.kind])) for block in chain.blocks
    )
    return replace(setting, chain=replace(chain, blocks=blocks)), _step_s(relaxed)


def relaxed_s(setting: Setting) -> float:
    """The seconds of a step by the linear relaxation of the integer program, which is never longer than by the program
    itself; 0 if the solver finds no solution."""
    relaxed = _relaxed(make_instance(setting))
    return _step_s(relaxed) if relaxed else 0.0


def _step_s(columns: Columns) -> float:
    return (columns.step_time().value() or 0.0) * columns.p.unit_s


def _relaxed(instance: Instance) -> Columns | None:
    """The solved linear relaxation; None if the solver found no solution."""
    columns = build(instance)
    for chosen in columns.comp:
        for x in chosen:
            x.cat = pulp.LpContinuous
    price = price_of_writing(columns) if instance.stores_activations else 0
    columns.rows.problem.setObjective(columns.step_time() + price)
    return columns if solve(columns.rows.problem, gap=0.0).found else None
