"""Makes Python's cyclic garbage collector run seldom in the search for blocks and in planning, where it takes up to a
third of the time and finds next to nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 100_000  # new objects before a collection; Python's default is 700


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Context manager or decorator in which Python's cyclic garbage collector runs after 100,000 new objects instead of
    700. It may be nested; the old setting is restored at the end."""
    before = gc.get_threshold()
    if not 0 < before[0] < _YOUNG:  # 0: garbage is never collected
        yield
        return
    gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
