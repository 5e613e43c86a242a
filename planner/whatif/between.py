"""Interpolates a chain between those of the same model for two numbers of rows."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar, cast

from planner.schedule.chain import Block, Chain

T = TypeVar("T")


def alike(low: Chain, high: Chain) -> tuple[Chain, Chain]:
    """Two chains of the same model for different numbers of rows, reduced to the options that both have. (Which values
    are worth saving depends on the rows of a micro-batch, so the options differ.)"""
    shared: list[tuple[Block, Block]] = []
    for a, b in zip(low.blocks, high.blocks, strict=True):
        others = {option.recipe: option for option in b.options}
        its = [option for option in a.options if option.recipe in others]
        shared.append(
            (
                replace(a, options=tuple(its)),
                replace(b, options=tuple(others[option.recipe] for option in its)),
            )
        )
    ours, theirs = zip(*shared, strict=True)
    return replace(low, blocks=ours), replace(high, blocks=theirs)


def between(low: T, high: T, share: float) -> T:
    """A value of the same structure as `low` and `high`, each number at the fraction `share` of the way from `low` to
    `high`. Whole numbers, such as bytes, are rounded up."""
    if isinstance(low, (bool, str)) or low is None:
        return low  # text, such as a kind that names a shape, is taken from `low`
    if isinstance(low, (int, float)):
        number = low + (cast(float, high) - low) * share
        return cast(T, max(0, math.ceil(number - 1e-6)) if isinstance(low, int) else max(0.0, number))
    if isinstance(low, tuple):
        return cast(T, tuple(between(a, b, share) for a, b in zip(low, cast(tuple[object, ...], high), strict=True)))
    assert is_dataclass(low) and not isinstance(low, type)
    names = (field.name for field in fields(low))
    return cast(T, replace(low, **{n: between(getattr(low, n), getattr(high, n), share) for n in names}))
