"""Builds the linear expressions of the integer program's rows: bytes moved per stage, and running sums over blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pulp

Term = Any  # a PuLP expression, a variable or a number: PuLP has no types


class Rows:
    """The PuLP problem under construction. Names must consist of letters, digits and underscores, which every solver
    accepts."""

    def __init__(self, name: str) -> None:
        self.problem = pulp.LpProblem(name, pulp.LpMinimize)

    def variable(self, name: str, upper: float | None = None, *, binary: bool = False) -> pulp.LpVariable:
        """A new variable between 0 and `upper` (None: unbounded), or a binary one."""
        return self.problem.add_variable(name, 0, 1 if binary else upper, "Binary" if binary else "Continuous")

    def equal(self, name: str, left: Term, right: Term) -> None:
        """Add the constraint left = right under `name`."""
        self._add(name, left, right, pulp.LpConstraintEQ)

    def at_most(self, name: str, left: Term, right: Term) -> None:
        """Add the constraint left ≤ right under `name`."""
        self._add(name, left, right, pulp.LpConstraintLE)

    def _add(self, name: str, left: Term, right: Term, sense: int) -> None:
        terms = pulp.LpAffineExpression().addInPlace(left).addInPlace(right, sign=-1)  # one copy: `==` makes four
        row = pulp.LpConstraint(terms, sense)
        if len(row):  # a row without variables would be dropped, true or not
            self.problem.addConstraint(row, name)
        elif not row.valid(1e-9):
            raise ValueError(f"{name} has no variable and does not hold: {row}")


class Sums:
    """Running sums of the variables x_0 … x_(L-1) of L blocks: `upto(i)` is x_0 + … + x_i, `since(i)` is x_i + … +
    x_(L-1)."""

    def __init__(self, rows: Rows, name: str, terms: Sequence[Term]) -> None:
        self._sums: list[Term] = []
        for i, term in enumerate(terms):
            total = rows.variable(f"sum_{name}_{i}")
            rows.equal(f"sum_{name}_{i}", total, (self._sums[-1] if i else 0) + term)
            self._sums.append(total)

    def upto(self, i: int) -> Term:
        """The sum of the terms of blocks 0 … `i`; 0 for `i` < 0."""
        return self._sums[min(i, len(self._sums) - 1)] if i >= 0 else 0

    def since(self, i: int) -> Term:
        """The sum of the terms of blocks `i` … L-1, where L is the number of blocks; 0 for `i` ≥ L."""
        if i >= len(self._sums):
            return 0
        return self._sums[-1] - (self._sums[i - 1] if i > 0 else 0)

    def all(self) -> Term:
        """The sum over all blocks."""
        return self._sums[-1]


class Flow:
    """The bytes moved at each of the positions (stages) 0 … `positions` - 1, as variables, and their running sum. At
    other positions nothing moves."""

    def __init__(self, rows: Rows, name: str, positions: int) -> None:
        self.at = [rows.variable(f"{name}_{u}") for u in range(positions)]
        self._sums: list[pulp.LpVariable] = []
        for u in range(positions):
            total = rows.variable(f"cum_{name}_{u}")
            rows.equal(f"cum_{name}_{u}", total, (self._sums[-1] if u else 0) + self.at[u])
            self._sums.append(total)

    def moved(self, u: int) -> Term:
        """The bytes moved at position `u`; 0 if there is no such position."""
        return self.at[u] if 0 <= u < len(self.at) else 0

    def upto(self, u: int) -> Term:
        """The bytes moved at positions 0 … `u`."""
        return self._sums[min(u, len(self._sums) - 1)] if u >= 0 else 0

    def within(self, first: int, last: int) -> Term:
        """The bytes moved at positions `first` … `last`."""
        return self.upto(last) - self.upto(first - 1) if last >= first else 0
