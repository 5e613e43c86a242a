"""Where a step may wait for the emulated device, and why; all else that waits inside one is an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.support.cuda.device import Device, HostWait

_INTERPRETER = "worker/runtime/cuda.py:CudaInterpreter.run"
STATED = {
    HostWait("Event.synchronize", _INTERPRETER, "offmate-cpu"): "an update on the CPU reads a gradient that is sent",
    HostWait("Event.synchronize", _INTERPRETER, "offmate-disk_read"): "a read fills a slot that a fetch has emptied",
    HostWait(
        "Event.synchronize", "worker/runtime/step_values.py:StepValues.coefficient_on_host", "offmate-cpu"
    ): "it reads the coefficient of all gradients",
    HostWait(
        "cudaHostAlloc", "worker/runtime/registered.py:pinned_like", "MainThread"
    ): "torch's pool has no pinned memory of a slice's size yet",
    HostWait(
        "cudaHostAlloc", "worker/runtime/registered.py:pinned", "MainThread"
    ): "nor of the size of a step's batches",
}
FIRST = {
    "worker/runtime/registered.py:registered": "host memory of what is offloaded is taken once",
    "planner/measure/frame_bytes.py:trace_blocks": "blocks and frame are traced before",
    "planner/measure/frame_bytes.py:trace_blocks.<locals>.<dictcomp>": "blocks and frame are traced before",
    "planner/cpu/meter.py:_Watch.__torch_dispatch__": "blocks and frame are traced before",
    "planner/graph/fake.py:_LargeAsFake.__torch_dispatch__": "blocks and frame are traced before",
}
"""Beside them, where slices are of a shape for the first time."""


LATE = HostWait("cudaHostRegister", "worker/runtime/registered.py:registered", "offmate-cpu")
"""What the CPU does of a first step may end in the second."""


def unstated(waits: list[HostWait], *, first: bool, second: bool = False) -> list[HostWait]:
    """Those that no table has. `first`: slices of such a shape have not come before; `second`: only once."""
    found = [wait for wait in waits if wait not in STATED and not (first and wait.where in FIRST)]
    return [wait for wait in found if not (second and wait == LATE)]


@contextlib.contextmanager
def a_step(device: Device, *, first: bool = False, second: bool = False) -> Iterator[None]:
    """Raises AssertionError when what runs inside waits for the device where it may not, whether PyTorch's own debug
    mode sees that or not."""
    before = len(device.waits)
    yield
    found = unstated(device.waits[before:], first=first, second=second)
    assert not found, found
