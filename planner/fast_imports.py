"""Speeds up large imports by switching off the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Inside, the garbage collector is off, and later it never visits the objects made inside. torch and transformers
    make a million objects that live as long as the process. Searching these for garbage, meanwhile and later, takes a
    third of the time of importing them. Does nothing in a process that has torch already: objects that live there may
    end.
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
