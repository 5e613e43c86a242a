"""Calls the CUDA runtime library that PyTorch has loaded, where PyTorch has no function for it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path


def runtime() -> ctypes.CDLL:
    """The CUDA runtime library that PyTorch has loaded. A second copy of the library would keep its errors to
    itself."""
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        path = line[line.find("/") :]
        if "/" in line and Path(path).name.startswith("libcudart"):  # in some wheels the name has a hash
            return ctypes.CDLL(path)
    return ctypes.CDLL(None)


def address_of(library: ctypes.CDLL, name: str) -> int:
    """The address of the library's function `name`. Raises AttributeError when the library has no function of that
    name."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address


def forget_error() -> None:
    """Clear the CUDA runtime's last error after it was handled. CUDA keeps it for the thread, and PyTorch would raise
    it at the thread's next kernel launch, which has not failed. An error that ends the CUDA context cannot be
    cleared."""
    with contextlib.suppress(AttributeError):  # a runtime inside PyTorch itself cannot be reached
        runtime().cudaGetLastError()
