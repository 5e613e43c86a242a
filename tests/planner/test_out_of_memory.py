"""All who say that memory is out say it in one way here."""

from __future__ import annotations

import pytest
import torch

from planner.errors import UserError
from planner.out_of_memory import as_one_error, host_memory_not_registered, is_out_of_memory, told_to_people

ASYNCHRONOUS = "\nCUDA kernel errors might be asynchronously reported at some other API call"
NO_ROOM = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"),
    RuntimeError("CUDA out of memory. Tried to allocate 5.00 MiB: 5.0 MiB allocated, 12.0 MiB reserved"),
    torch.AcceleratorError("CUDA error: out of memory" + ASYNCHRONOUS),
    RuntimeError("CUDA error: out of memory" + ASYNCHRONOUS),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("out of memory (2)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]
OTHERS = [
    torch.AcceleratorError("CUDA error: device-side assert triggered" + ASYNCHRONOUS),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered" + ASYNCHRONOUS),
    RuntimeError("operation not supported (801)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(…)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),  # and no full card
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError(""),
    ValueError("CUDA out of memory"),
    MemoryError("CUDA out of memory"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", NO_ROOM, ids=repr)
def test_whoever_says_that_the_device_has_no_room_is_understood(error: RuntimeError) -> None:
    assert is_out_of_memory(error)
    with pytest.raises(torch.OutOfMemoryError) as caught, as_one_error():
        raise error
    assert str(caught.value) == str(error)
    assert caught.value is error or caught.value.__cause__ is error


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_another_error_stays_what_it_is(error: BaseException) -> None:
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as caught, as_one_error():
        raise error
    assert caught.value is error


def test_people_are_told_what_was_done_when_memory_ran_out_and_what_to_do() -> None:
    with pytest.raises(UserError) as told, told_to_people("The device ran out of memory as it sang.", hint="hum"):
        raise NO_ROOM[2]
    assert str(told.value) == (
        "The device ran out of memory as it sang.\n  CUDA error: out of memory\n  hint: hum   [out-of-memory]"
    )
    with pytest.raises(ValueError, match=r"^CUDA"), told_to_people("The device ran out of memory.", hint="hum"):
        raise OTHERS[8]


def test_host_memory_that_cannot_be_registered_is_told_in_full() -> None:
    error = host_memory_not_registered(2**30, 3 * 2**30, RuntimeError("out of memory (2)"))
    assert str(error) == (
        "CUDA cannot register as much host memory as the plan needs.\n"
        "  3.0 GiB are registered with CUDA, 1.0 GiB more are refused: out of memory (2)\n"
        "  hint: give a smaller cpu_budget; WSL2 limits such memory: try a larger memory= in .wslconfig, "
        "or Linux itself   [host-memory-not-registered]"
    )
    assert (error.exit_code, error.had_bytes) == (1, 3 * 2**30)
