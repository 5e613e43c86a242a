"""Watches the Python numbers that code takes out of tensors (`x.item()`) to choose a branch, and makes code take the
other branches."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import UserError

Site = tuple[str, int, int]
"""Where code takes a number out of a tensor: file, line, column."""

Number = bool | int | float | complex

_TORCH = str(Path(torch.__file__).parent)
_FAR = 1e30  # beyond any number that code compares with


class BranchNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that watches the numbers that code takes out of tensors, by `bool(x)`, `float(x)` or `x.item()`.

    times   site in the code -> how many numbers it has taken
    first   site -> the first of them
    """

    def __init__(self, forced: Mapping[Site, Number]) -> None:
        """`forced`: site -> the number that the code there gets the first time, whatever the tensor holds."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.times, self.first = Counter[Site](), dict[Site, Number]()
        self._forced = forced

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten._local_scalar_dense.default:
            return result
        site = _site()
        self.times[site] += 1
        if self.times[site] > 1:
            return result
        return self.first.setdefault(site, self._forced.get(site, result))


def _site() -> Site:
    """Where in the code, outside of torch, the number was asked for."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    # The interpreter may replace instructions at run time, but not their positions in the source.
    line, _, column, _ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return frame.f_code.co_filename, line or 0, column or 0


def others(number: Number) -> Iterator[Number]:
    """Numbers that, in place of `number`, may make code take another branch: the other truth value; for a float, 0 and
    a far number on each side. Yields nothing for a whole number: it counts or indexes, and another one may make no
    sense."""
    if isinstance(number, bool):
        yield not number
    elif isinstance(number, float):
        yield from (-_FAR, 0.0, _FAR)


def depends_on_data(name: str, number: str) -> UserError:
    """Makes the error for a block whose memory cannot be bounded, "block-depends-on-data". `number`: says on which
    number in the block's code the memory depends."""
    return UserError(
        f"The memory that block {name} needs depends on its data and cannot be bounded.",
        code="block-depends-on-data",
        numbers=(number,),
        hint="keep its code from turning tensors into Python numbers (x.item(), if x.sum() > 0): use torch.where",
    )
