"""Tensors of the device: late, in memory that is reused in the host's order; copies; what the host waits for."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager

from tests.support.cuda.device import Device
from tests.support.cuda.streams import Mood
from tests.support.tiny_models import batch_of, make_model

pytestmark = pytest.mark.emulated

LATE = Mood(haste=(0.0,))
SIDE_FIRST = Mood(haste=(0.0, 1.0))


def what(device: Device) -> list[str]:
    """What the host has waited for, by kind."""
    return [wait.what for wait in device.waits]


def test_torch_sees_a_device(device: Device) -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    x = torch.ones(2, 3, device="cuda")
    assert x.device == torch.device("cuda", 0) and x.is_cuda and not x.is_cpu
    assert (x + x).device == x[0].device == x.t().device == x.clone().device == torch.arange(3, device="cuda").device
    assert x.cpu().device.type == "cpu"
    with pytest.raises(RuntimeError, match=r"(?i)\bcpu"):
        x + torch.ones(2, 3)
    with torch.device("meta"):  # transformers asks so whether it is to make weights
        assert torch.tensor([]).is_meta


def test_operations_run_when_somebody_looks(device: Device) -> None:
    device.queues.set_mood(LATE)
    x = torch.ones(3, device="cuda")
    x.add_(1)
    y = x * 2
    assert len(device.queues.default.queue) >= 3
    assert y.tolist() == [4, 4, 4]


def test_operations_are_the_same_wherever_they_run(device: Device) -> None:
    """The garbage collector may end, in the middle of a fake operation, memory whose end waits for the device."""
    device.queues.set_mood(LATE)
    x = torch.arange(4.0, device="cuda")
    sums, copied = x.cumsum(0), torch.empty(4, device="cuda").copy_(x)
    with enable_python_dispatcher(), FakeTensorMode() as mode, in_kernel_invocation_manager(mode):
        torch.cuda.synchronize()
    assert sums.tolist() == [0, 1, 3, 6] and copied.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_computes_what_it_does_on_the_cpu(device: Device, dtype: torch.dtype) -> None:
    device.queues.set_mood(LATE)
    here, there = (make_model("llama", dtype, dropout=0.0) for _ in range(2))
    there.to("cuda")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = here(**batch_of()).loss
        found = there(**{name: t.cuda() for name, t in batch_of().items()}).loss
    wanted.backward()
    found.backward()
    assert torch.equal(found.cpu(), wanted)
    for mine, other in zip(here.parameters(), there.parameters(), strict=True):
        assert other.is_cuda and (mine.grad - other.grad.cpu()).norm() <= 8 * torch.finfo(dtype).eps * mine.grad.norm()


def test_memory_is_reused_in_the_hosts_order_while_its_work_is_still_to_run(device: Device) -> None:
    device.queues.set_mood(LATE)
    x = torch.ones(1 << 20, device="cuda")
    address, total = x.data_ptr(), x.sum()
    del x
    y = torch.zeros(1 << 20, device="cuda")
    assert y.data_ptr() == address
    assert total.item() == 1 << 20 and y.sum().item() == 0


def test_what_is_new_and_what_is_freed_is_nan(device: Device) -> None:
    assert torch.empty(5, device="cuda").isnan().all()
    torch.cuda.synchronize()
    device.queues.set_mood(SIDE_FIRST)
    side, x = torch.cuda.Stream(), torch.ones(1000, device="cuda")
    with torch.cuda.stream(side):
        early = x + 0  # nothing makes it wait for the stream that fills x
    device.queues.set_mood(Mood(haste=(1.0, 0.0)))
    with torch.cuda.stream(side):
        late = x + 0
    del x  # nothing keeps its memory for the other stream
    torch.ones(1 << 20, device="cuda")  # elsewhere; who gives the device work makes it see what was freed
    torch.cuda.synchronize()
    assert early.isnan().all()
    assert late.isnan().all()


def test_a_recorded_streams_tensor_is_not_reused_before_that_stream_is_done(device: Device) -> None:
    side, x = torch.cuda.Stream(), torch.ones(1000, device="cuda")
    address = x.data_ptr()
    device.queues.set_mood(Mood(haste=(1.0, 0.0)))
    with torch.cuda.stream(side):
        late = x + 0
    x.record_stream(side)
    del x
    y = torch.ones(1000, device="cuda")
    assert y.data_ptr() != address
    side.synchronize()
    assert late.sum().item() == 1000
    assert torch.zeros(1000, device="cuda").data_ptr() == address


def test_a_views_memory_lives_as_long_as_a_view(device: Device) -> None:
    before = torch.cuda.memory_allocated()
    x = torch.ones(4, 250, device="cuda")
    row = x[1]
    del x
    assert torch.cuda.memory_allocated() - before == 4096
    del row
    assert torch.cuda.memory_allocated() == before


class TestCopies:
    def test_the_device_reads_pinned_memory_when_the_copy_runs(self, device: Device) -> None:
        device.queues.set_mood(LATE)
        host = torch.ones(3).pin_memory()
        assert host.is_pinned() and not torch.ones(3).is_pinned()
        there = host.to("cuda", non_blocking=True)
        host.fill_(2)
        assert there.tolist() == [2, 2, 2]

    def test_pageable_memory_is_read_before_the_call_returns_and_may_make_it_wait(self, device: Device) -> None:
        device.queues.set_mood(LATE)
        host = torch.ones(3)
        there = host.to("cuda", non_blocking=True)
        host.fill_(2)
        assert what(device) == ["copy of pageable memory to the device"]
        assert there.tolist() == [1, 1, 1]

    def test_a_copy_to_pinned_memory_arrives_late_and_one_to_pageable_memory_at_once(self, device: Device) -> None:
        device.queues.set_mood(LATE)
        there, pinned = torch.ones(3, device="cuda"), torch.zeros(3).pin_memory()
        device.waits.clear()
        pinned.copy_(there, non_blocking=True)
        assert pinned.tolist() == [0, 0, 0] and what(device) == []
        torch.cuda.synchronize()
        assert pinned.tolist() == [1, 1, 1]
        assert torch.zeros(3).copy_(there, non_blocking=True).tolist() == [1, 1, 1]
        assert what(device)[-1] == "copy to pageable memory of the host"

    def test_memory_is_reached_while_it_is_registered(self, device: Device) -> None:
        host = torch.ones(1024)
        assert torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0) == 0
        device.queues.set_mood(LATE)
        there = host[3:9].to("cuda", non_blocking=True)
        assert host[3:9].is_pinned()
        host.fill_(5)
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
        with pytest.raises(RuntimeError, match="not registered"):
            there.sum().item()
        device.queues.rest()

    def test_the_pool_has_pinned_memory_back_when_its_copies_are_done(self, device: Device) -> None:
        device.queues.set_mood(LATE)
        host = torch.ones(3000).pin_memory()
        address = host.data_ptr()
        there = host.to("cuda", non_blocking=True)
        del host
        other = torch.zeros(3000).pin_memory()
        assert other.data_ptr() != address
        assert there.sum().item() == 3000
        assert torch.zeros(3000).pin_memory().data_ptr() == address

    def test_a_copy_in_another_layout_is_no_silent_surprise(self, device: Device) -> None:
        there = torch.arange(6.0, device="cuda").view(2, 3)
        assert there.t().to("cpu", non_blocking=True).tolist() == [[0, 3], [1, 4], [2, 5]]
        with pytest.raises(RuntimeError, match="nobody has filled"):
            torch.empty(3, 2).pin_memory().copy_(there.t(), non_blocking=True)
        assert torch.empty(3, 2).copy_(there.t()).tolist() == [[0, 3], [1, 4], [2, 5]]
        assert there.to("cpu", torch.bfloat16).dtype == torch.bfloat16


WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "mask put": lambda x: x.__setitem__(x > 0, 1.0),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "to the host": lambda x: x.cpu(),
    "pinned to the device": lambda x: x.copy_(torch.ones(3).pin_memory()),
    "a Python list": lambda x: torch.tensor([1.0, 2.0], device="cuda"),
    "an index on the host": lambda x: x[torch.tensor([0, 1])],
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
}
UNSEEN = {
    "device": lambda x: torch.cuda.synchronize(),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
    "pageable": lambda x: x.copy_(torch.ones(3), non_blocking=True),
    "register": lambda x: (
        torch.cuda.cudart().cudaHostUnregister(x.data_ptr())
        if torch.cuda.cudart().cudaHostRegister(x.data_ptr(), 12, 0)
        else None
    ),
}
FREE = {
    "kernels": lambda x: (x @ x, torch.full((), 3.0, device="cuda"), torch.zeros_like(x), x[1:], x.softmax(0)),
    "a number of the host's": lambda x: x * 3.0 + torch.tensor(2.0),
    "made of lengths": lambda x: torch.arange(5, device="cuda"),
    "pinned": lambda x: x.copy_(torch.ones(3).pin_memory(), non_blocking=True),
    "between tensors": lambda x: x.copy_(torch.ones_like(x)).to(torch.bfloat16),
    "an event": lambda x: torch.cuda.current_stream().wait_event(torch.cuda.current_stream().record_event()),
}


@pytest.mark.parametrize("name", WAITING)
def test_whoever_waits_is_seen_and_an_error_where_that_is_asked_for(device: Device, name: str) -> None:
    x = torch.ones(3, device="cuda")
    torch.ones(3).pin_memory()  # the pool has some
    device.waits.clear()
    WAITING[name](x)
    assert len(what(device)) == 1
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        WAITING[name](x)


@pytest.mark.parametrize("name", UNSEEN)
def test_torchs_debug_mode_does_not_see_all_waits(device: Device, name: str) -> None:
    torch.cuda.set_sync_debug_mode("error")
    UNSEEN[name](torch.ones(3, device="cuda"))
    assert what(device)


@pytest.mark.parametrize("name", FREE)
def test_nobody_waits_for_what_the_host_does_not_look_at(device: Device, name: str) -> None:
    torch.ones(3).pin_memory()  # the pool has some
    device.waits.clear()
    FREE[name](torch.ones(3, device="cuda"))
    assert what(device) == []


def test_random_numbers_are_those_of_the_seed_and_the_place_at_the_call(device: Device) -> None:
    def draw() -> list[list[float]]:
        torch.manual_seed(7)
        return [torch.rand(4, device="cuda").tolist(), torch.dropout(torch.ones(9, device="cuda"), 0.5, True).tolist()]

    first = draw()
    assert first == draw() and first[0] != torch.rand(4, device="cuda").tolist()
    state = torch.cuda.get_rng_state()
    device.queues.set_mood(LATE)
    late = torch.rand(4, device="cuda")
    torch.manual_seed(1)
    torch.cuda.set_rng_state(state)
    assert late.tolist() == torch.rand(4, device="cuda").tolist()


def test_out_of_memory_is_raised_under_the_cap_and_all_goes_on(device: Device) -> None:
    torch.cuda.set_per_process_memory_fraction(40 / 1024)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(80 << 20, dtype=torch.uint8, device="cuda")
    assert torch.ones(3, device="cuda").sum().item() == 3
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.empty(80 << 20, dtype=torch.uint8, device="cuda")


def test_without_data_memory_is_as_ever(device: Device) -> None:
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    (x @ x).cpu()
    with_data = torch.cuda.max_memory_allocated() - before
    device.dry = True
    torch.cuda.reset_peak_memory_stats()
    (x @ x).cpu()
    assert torch.cuda.max_memory_allocated() - before == with_data > 0
    with pytest.raises(RuntimeError, match="nothing is computed"):
        x.sum().item()


def test_threads_have_streams_of_their_own(device: Device) -> None:
    side, found = torch.cuda.Stream(), []
    with torch.cuda.stream(side):
        thread = threading.Thread(target=lambda: found.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
        assert torch.cuda.current_stream() is side
    assert found == [torch.cuda.default_stream()]
