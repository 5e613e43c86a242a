"""Calls of CUDA that fail, on the emulated device: what was caught is over, and what was too little is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from planner.errors import UserError
from planner.out_of_memory import is_out_of_memory
from tests.support.arena import arena_on
from tests.support.cuda.device import Device
from tests.support.cuda.memory import MIB
from tests.support.cuda.plugged import OUT_OF_MEMORY
from tests.support.engines import data, own_threads
from tests.support.late_engines import CUDA, Case, chain_for, engine_for, expected, train
from worker.engine.engine import Engine
from worker.runtime.arena import Arena
from worker.runtime.cuda import CudaMachine
from worker.runtime.registered import registered_bytes

pytestmark = pytest.mark.emulated

ALONE, CASE = (Case("llama", "mixed", slices=slices, clip=0.5) for slices in (1, 2))
"""One slice runs in the caller's own thread, which still has the error that it met; those of several end with them."""


StepThatFails = Callable[[Device, Engine, Case, int], None]


@pytest.fixture
def arena(device: Device) -> Iterator[Arena]:
    """The allocator until the test ends."""
    with arena_on(device) as found:
        yield found


@pytest.fixture(autouse=True)
def _the_card_is_as_large_as_before(device: Device) -> Iterator[None]:
    total_bytes = device.total_bytes
    yield
    device.total_bytes, device.host_bytes = total_bytes, 2**62


def leave(device: Device, free_bytes: int) -> None:
    """Let the driver have so much left."""
    device.total_bytes += free_bytes - device.free_bytes


def test_memory_that_was_found_at_the_second_try_can_be_used(device: Device, arena: Arena) -> None:
    """Of 30 MiB: the driver is asked for 20 first, and has 12 the second time."""
    leave(device, 30 * MIB)
    before = arena.counts()
    tensors = [torch.full((9 * MIB // 4,), float(k), device=CUDA) for k in range(3)]
    assert [float(tensor[-1]) for tensor in tensors] == [0.0, 1.0, 2.0]
    found = arena.counts()
    assert found.mallocs - before.mallocs > 2, "no call has failed"
    assert found.reserved - before.reserved <= 30 * MIB


def test_after_memory_that_was_refused_the_device_computes(device: Device, arena: Arena) -> None:
    leave(device, 4 * MIB)
    one = torch.ones(3, device=CUDA)
    with pytest.raises(RuntimeError, match="CUDA out of memory") as caught:
        torch.empty(5 * MIB, dtype=torch.uint8, device=CUDA)
    assert is_out_of_memory(caught.value)
    assert (one + one).tolist() == [2.0] * 3


def too_long(device: Device, engine: Engine, case: Case, number: int) -> None:
    """A step whose slices the driver has no memory for."""
    batches, rest = data(number, case.batches)
    free_bytes = device.free_bytes
    leave(device, MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried"):
        engine.step([{name: t.repeat(1, 300) for name, t in b.items()} for b in batches], learning_rate=1.0, **rest)
    leave(device, free_bytes)


def refused_by_a_library(device: Device, engine: Engine, case: Case, number: int) -> None:
    """A step in which CUDA has no memory for a kernel, or a library none for itself."""
    batches, rest = data(number, case.batches)
    layer = engine._model.get_submodule(chain_for(case.model, case.dtype).blocks[2].name)
    hook = layer.register_forward_pre_hook(lambda *_: (device.driver.failed(OUT_OF_MEMORY), None)[1])
    with pytest.raises(torch.OutOfMemoryError, match="CUDA error: out of memory"):
        engine.step(batches, learning_rate=1.0, **rest)
    hook.remove()


@pytest.mark.parametrize("case", [ALONE, CASE], ids=str)
@pytest.mark.parametrize("step_that_fails", [too_long, refused_by_a_library])
def test_after_a_step_without_memory_the_weights_are_whole_and_training_goes_on(
    device: Device, request: pytest.FixtureRequest, case: Case, step_that_fails: StepThatFails
) -> None:
    wanted = expected(case)
    request.getfixturevalue("arena")
    engine = engine_for(case)
    threads = own_threads()
    try:
        found = []
        for number, tensor in enumerate(train(engine, case)):
            found.append(tensor)
            if number < 2:
                step_that_fails(device, engine, case, number + 1)
                assert not engine.torn and sorted(own_threads()) == sorted(threads)
    finally:
        engine.close()
    assert len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("status", ["CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED"])
def test_a_library_that_does_not_begin_lacks_memory_where_the_card_is_full(device: Device, status: str) -> None:
    error = RuntimeError(f"CUDA error: {status} when calling `cublasCreate(handle)`")
    leave(device, 400 * MIB)
    assert not is_out_of_memory(error)
    leave(device, 40 * MIB)
    assert is_out_of_memory(error)


def test_host_memory_that_cannot_be_registered_is_named_with_its_bytes(device: Device) -> None:
    machine = CudaMachine(CUDA)
    before = registered_bytes()
    kept = machine.host_empty((3 * MIB,), torch.uint8)
    assert registered_bytes() == before + kept.nbytes
    device.host_bytes = device.host.bytes + 2 * MIB
    for more in (
        lambda: machine.host_empty((5 * MIB,), torch.uint8),
        lambda: machine.stage(torch.ones(3 * MIB)),
        lambda: machine.stage_step([{"input_ids": torch.ones(3 * MIB)}], 0),
    ):
        with pytest.raises(UserError) as caught:
            more()
        error = caught.value
        assert (error.code, error.had_bytes) == ("host-memory-not-registered", before + kept.nbytes)
        assert error.numbers[0].endswith("out of memory") or error.numbers[0].endswith("out of memory (2)")
        assert torch.ones(3, device=CUDA).add_(1).tolist() == [2.0] * 3, "the refusal is over"
    assert machine.host_empty((MIB,), torch.uint8).is_pinned()
    del kept
    assert registered_bytes() == before


def test_an_engine_that_had_too_little_registered_memory_can_be_made_again(device: Device) -> None:
    wanted = expected(CASE)
    device.host_bytes = device.host.bytes + 4096
    with pytest.raises(UserError, match="host-memory-not-registered"):
        engine_for(CASE)
    device.host_bytes = 2**62
    engine = engine_for(CASE)
    found = list(train(engine, CASE))
    engine.close()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_emulated_device_raises_a_threads_last_error_once_and_no_other_threads(device: Device) -> None:
    device.driver.failed(OUT_OF_MEMORY)
    copied = torch.empty(3, device=CUDA).copy_(torch.ones(3))  # no kernel
    with pytest.raises(torch.AcceleratorError, match="CUDA error: out of memory"):
        copied + 1
    assert (copied + 1).tolist() == [2.0] * 3
