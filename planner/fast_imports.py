"""Speeds up large imports: the garbage collector is off, and torch.compile does not load its compilers yet."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, cast


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


@contextlib.contextmanager
def compiled_when_called() -> Iterator[None]:
    """A context for imports of modules that decorate functions with torch.compile, as bitsandbytes does: such a
    function is compiled when it is first called. The decoration alone would load torch's compilers, which takes a
    second."""
    import torch

    at_once: Callable[..., Any] = torch.compile

    def late(function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(late, **options)
        if not isinstance(function, FunctionType):
            return at_once(function, **options)
        compiled = functools.cache(lambda: at_once(function, **options))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = cast(Any, late)
    try:
        yield
    finally:
        torch.compile = at_once
