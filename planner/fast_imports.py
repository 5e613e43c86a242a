"""What large imports need: the garbage collector out of the way."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Inside, nothing is collected, and what is made inside is never looked at again: torch and transformers make
    a million objects that live as long as the process. To search them for garbage, meanwhile and later, is a third of
    what importing them takes. In a process that has torch already nothing is done: what lives there may end.
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
