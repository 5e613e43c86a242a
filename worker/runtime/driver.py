"""CUDA's runtime as PyTorch has loaded it, for what PyTorch has no function for."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path


def runtime() -> ctypes.CDLL:
    """The library that PyTorch calls: another copy of it would have other errors."""
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        path = line[line.find("/") :]
        if "/" in line and Path(path).name.startswith("libcudart"):  # in some wheels the name has a hash
            return ctypes.CDLL(path)
    return ctypes.CDLL(None)


def address_of(library: ctypes.CDLL, name: str) -> int:
    """Where a function of the library is. Raises AttributeError when it has none of that name."""
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found is not None
    return found


def forget_error() -> None:
    """Called when a call of the runtime has failed, and its error was seen: CUDA keeps it for the thread, and PyTorch
    would raise it from the thread's next kernel, which has none. What ends a context stays, whoever asks."""
    with contextlib.suppress(AttributeError):  # in a PyTorch that contains the runtime nobody can reach it
        runtime().cudaGetLastError()
