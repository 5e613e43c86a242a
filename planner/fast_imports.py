"""Speeds up large imports by switching off the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """A context for large imports: the garbage collector is off, and never visits the objects made in it later.

    torch and transformers make a million objects that live as long as the process. Searching these for garbage, during
    the imports and later, takes a third of the time of importing them. Does nothing in a process that has already
    loaded torch, because objects that are alive there may still become garbage.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
