"""What large imports need: the garbage collector out of the way."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Inside, nothing is collected, and what is made inside is never looked at again: torch and transformers make
    a million objects that live as long as the process. To search them for garbage, meanwhile and later, is a third of
    what importing them takes.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
