"""Recognizes every way in which CUDA, its libraries and PyTorch report that no memory is left. Imports torch only when
a function is called."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

from planner.errors import UserError, first_line
from planner.units import format_bytes

HOST_MEMORY_NOT_REGISTERED = "host-memory-not-registered"

# Only PyTorch's own allocator has an error type for this. Other errors are known by their words, in this order: what
# `arena.c` throws; a call of CUDA's runtime (torch.AcceleratorError, before PyTorch 2.8 RuntimeError) or driver;
# torch.cuda.check_error; a kernel of triton's; a handle or a workspace of cuBLAS, cuDNN and their like.
_NO_MEMORY = re.compile(
    r"CUDA out of memory|CUDA (driver )?error: out of memory|out of memory \(2\)$|Triton Error \[CUDA\]: out of memory"
    r"|.*\bCU[A-Z]+_STATUS_(INTERNAL_ERROR_DEVICE_)?ALLOC(ATION)?_FAILED\b"
)
_NOT_BEGUN = re.compile(r".*\bCU[A-Z]+_STATUS_NOT_INITIALIZED\b")  # one of its causes is lack of memory
_LIBRARY_BYTES = 2**28  # more than a library takes from the driver as it begins: cuBLAS 70 to 95 MB


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that the device had no memory left."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = first_line(error)
    return bool(_NO_MEMORY.match(text)) or (bool(_NOT_BEGUN.match(text)) and _is_full())


def _is_full() -> bool:
    """Whether the driver has less memory left than a library needs to begin."""
    import torch

    try:
        return torch.cuda.mem_get_info()[0] < _LIBRARY_BYTES
    except (RuntimeError, AssertionError):  # the device does not answer any more, or there is none
        return False


@contextlib.contextmanager
def as_one_error() -> Iterator[None]:
    """A context in which torch.OutOfMemoryError is raised if the device has no memory left, whichever library reports
    it."""
    import torch

    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def forget_frames(error: BaseException) -> None:
    """Clear the local variables in the stack frames of an error and of its cause. Otherwise the activations in them
    would stay on the device while the error is handled, and take the memory of what is tried instead. Running frames
    are not changed."""
    for link in (error, error.__cause__):
        traceback.clear_frames(None if link is None else link.__traceback__)


@contextlib.contextmanager
def told_to_people(what: str, hint: str) -> Iterator[None]:
    """A context in which UserError "out-of-memory" with the texts `what` and `hint` is raised if the device has no
    memory left."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(what, code="out-of-memory", numbers=(first_line(error),), hint=hint) from error


def host_memory_not_registered(asked_bytes: int, had_bytes: int, error: BaseException) -> UserError:
    """The UserError that CUDA refuses to lock (pin) `asked_bytes` of host memory; `had_bytes` are locked already."""
    return UserError(
        "CUDA cannot register as much host memory as the plan needs.",
        code=HOST_MEMORY_NOT_REGISTERED,
        had_bytes=had_bytes,
        numbers=(
            f"{format_bytes(had_bytes)} are registered with CUDA, {format_bytes(asked_bytes)} more are refused: "
            f"{first_line(error)}",
        ),
        hint="give a smaller cpu_budget; WSL2 limits such memory: try a larger memory= in .wslconfig, or Linux itself",
    )
