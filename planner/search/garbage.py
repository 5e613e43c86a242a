"""Python's search for garbage in cycles, which takes a seventh of a plan's time and finds next to nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 100_000  # objects more than before; by default 700


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Within it garbage is looked for seldom. It may be nested."""
    before = gc.get_threshold()
    if not 0 < before[0] < _YOUNG:  # 0: it is never looked for
        yield
        return
    gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
