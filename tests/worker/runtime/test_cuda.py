from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from planner.graph import run_slice
from planner.graph.pieces import Pieces
from planner.schedule.items import Item
from tests.support.engine_plans import adamw, chain_of, mixed_plan, resident_plan
from tests.support.engines import data, learning_rate, own_threads
from tests.support.families import masked_batch
from tests.support.tiny_models import make_model
from worker.check.plain_pytorch import PlainTraining
from worker.engine.device_items import Device
from worker.engine.engine import Engine
from worker.engine.host_items import Host
from worker.engine.stored_weights import StoredWeights
from worker.runtime.cuda import CudaMachine

pytestmark = pytest.mark.gpu
on_a_card = pytest.mark.gpu(real=True)
"""On the emulated device tests/worker/runtime/test_late_device.py asks for more."""


BF16 = torch.bfloat16
CODES = {}  # generated code is shared by kind and shapes; here by all tests, to save time


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


def device():
    return torch.device("cuda", torch.cuda.current_device())


@functools.cache
def chain_for(name, dtype):
    return chain_of(make_model(name, dtype), device=device())


def engine_of(name, plan_of, *, slices, clip=None, dtype=torch.float32, chain=None):
    model, chain = make_model(name, dtype), chain or chain_for(name, dtype)
    plan = plan_of(chain, slices=slices, clip=clip is not None)
    plan = replace(plan, gpu_budget_bytes=0)  # no cap: plain PyTorch has its memory on the same device
    engine = Engine(model, plan=plan, chain=chain, device=device(), optimizer=adamw(model), max_grad_norm=clip)
    engine.plan = plan
    return engine


def assert_equals_plain_pytorch(name, plan_of, *, slices, clip=None, dtype=torch.float32, steps=4, chain=None):
    """Losses, norms and states, bit by bit. The update of a tensor is on the device that it is on under the plan: a
    CPU's need not round as a GPU's."""
    engine = engine_of(name, plan_of, slices=slices, clip=clip, dtype=dtype, chain=chain)
    if chain is None:
        engine._rounds.codes = CODES.setdefault(dtype, {})
    on_cpu = {tensor for stage in engine.plan.stages for tensor in stage.cpu_update}
    model = make_model(name, dtype)
    plain = PlainTraining(model, optimizer=[adamw(model)], max_grad_norm=clip, device=device(), on_cpu=on_cpu)
    for step in range(steps):
        batches, rest = data(step, slices)
        # A tensor, as in training: a device multiplies by a number's inverse, and divides by a tensor.
        items, seeds, rate = torch.tensor(rest["num_items_in_batch"]), rest["seeds"], learning_rate(step)
        got = engine.step(batches, learning_rate=rate, seeds=seeds, num_items_in_batch=items)
        expected = plain.step(batches, learning_rate=rate, seeds=seeds, items=items)
        assert all(torch.equal(a, b) for a, b in zip(got.losses, expected.losses, strict=True)), step
        assert clip is None or torch.equal(got.grad_norm, expected.grad_norm), step
    wanted = dict(plain.state())
    for tensor, parts in engine.state():
        assert all(torch.equal(part, wanted[tensor][kind]) for kind, part in parts.items()), tensor
    engine.close()
    assert own_threads() == []


@on_a_card
@pytest.mark.parametrize(("name", "slices", "clip"), [("llama", 1, None), ("gpt2", 4, 0.5)])
def test_a_resident_plan_equals_plain_pytorch_bitwise(name, slices, clip):
    assert_equals_plain_pytorch(name, resident_plan, slices=slices, clip=clip)


def test_activations_that_are_copied_for_two_turns_come_back_whole():
    offload = functools.partial(resident_plan, option="offload-all", copy_turns=2)
    assert_equals_plain_pytorch("llama", offload, slices=2, steps=3)


@pytest.mark.gpu(real=True)  # PyTorch's kernels for CUDA
@pytest.mark.parametrize(
    ("name", "backend"), [("gpt2", "EFFICIENT_ATTENTION"), ("llama", "FLASH_ATTENTION"), ("llama", None)]
)  # efficient attention has no kernel for the tiny Llama's grouped heads
def test_offloaded_activations_of_fused_attention_with_dropout_come_back_whole(name, backend):
    every = [
        getattr(torch.nn.attention.SDPBackend, name) for name in ("EFFICIENT_ATTENTION", "FLASH_ATTENTION", "MATH")
    ]
    chosen = every if backend is None else getattr(torch.nn.attention.SDPBackend, backend)
    dtype = BF16 if backend == "FLASH_ATTENTION" else torch.float32
    with torch.nn.attention.sdpa_kernel(chosen):
        chain = chain_of(make_model(name, dtype), device=device())
        offload = functools.partial(resident_plan, option="offload")
        assert_equals_plain_pytorch(name, offload, slices=2, dtype=dtype, steps=3, chain=chain)


@on_a_card
@pytest.mark.parametrize(
    ("name", "slices", "clip", "dtype"),
    [
        ("llama", 1, None, torch.float32),
        ("llama", 4, 0.5, BF16),
        ("gpt2", 4, None, BF16),
        ("gpt2", 1, 0.5, BF16),
        ("gpt2", 4, 0.5, torch.float32),
    ],
)
def test_a_mixed_plan_equals_plain_pytorch_bitwise(name, slices, clip, dtype):
    assert_equals_plain_pytorch(name, mixed_plan, slices=slices, clip=clip, dtype=dtype)


def test_many_steps_of_a_mixed_plan_lose_no_byte():
    engine = engine_of("llama", mixed_plan, slices=2)
    allocated = []
    for step in range(12):
        train(engine, [step], 2)
        engine.drain()
        allocated.append(torch.cuda.memory_allocated())
    # A thread may still hold what its last operation was for, so a step ends with a little less or more.
    assert max(allocated[8:]) <= max(allocated[3:8])
    engine.close()


def test_the_allocator_is_capped_by_the_budget_until_the_machine_is_uncapped():
    machine = CudaMachine(torch.device("cuda"))
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.empty_cache()
    machine.cap(torch.cuda.memory_reserved() + (64 << 20), 1 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    machine.uncap()
    assert torch.cuda.get_per_process_memory_fraction() == before
    torch.empty(128 << 20, dtype=torch.uint8, device="cuda")


def test_host_memory_is_registered_and_of_exact_size():
    machine = CudaMachine(torch.device("cuda"))
    small, other = (machine.host_empty((3, 5), torch.float32) for _ in range(2))
    large = machine.host_empty((3 << 20,), torch.float32)
    for tensor in (small, other, large):
        tensor.fill_(1.0)
        assert tensor.is_pinned() and tensor.is_contiguous()
    assert large.untyped_storage().nbytes() == large.nbytes
    assert torch.equal(large.to("cuda", non_blocking=True).cpu(), large)


def train(engine, steps, slices):
    for step in steps:
        batches, rest = data(step, slices)
        engine.step(batches, learning_rate=learning_rate(step), **rest)


@pytest.fixture
def waiting():
    """waiting(mode): what torch does where the host waits for the device, until the test ends."""
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@on_a_card
@pytest.mark.parametrize(("slices", "clip"), [(1, None), (4, 0.5)])
def test_a_step_runs_where_waiting_for_the_device_is_an_error(slices, clip, waiting):
    engine = engine_of("llama", mixed_plan, slices=slices, clip=clip)
    train(engine, range(3), slices)
    waiting("error")
    train(engine, range(3, 6), slices)
    waiting("default")
    engine.close()


def test_what_a_model_asks_of_a_masked_batch_the_host_answers(waiting):
    machine = CudaMachine(torch.device("cuda"))
    model = make_model("llama").to(machine.device)
    batch = {name: machine.stage(tensor) for name, tensor in masked_batch().items()}

    def loss():
        torch.manual_seed(3)
        with machine.computing(), machine.frame(batch):
            return run_slice(model, batch, {}, machine.device, Pieces())

    torch.manual_seed(3)
    wanted = model(**{name: tensor.to(machine.device) for name, tensor in batch.items()}).loss
    loss()
    waiting("error")
    got = loss()
    waiting("default")
    assert torch.equal(got, wanted)


@pytest.mark.gpu(real=True)  # CUDA's profiler
def test_a_profile_shows_no_wait_for_the_device_in_a_step():
    engine = engine_of("llama", mixed_plan, slices=2, clip=0.5)
    train(engine, range(3), 2)
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profile:
        with torch.profiler.record_function("the steps"):
            train(engine, range(3, 5), 2)
        engine.drain()
    events = profile.events()
    steps = next(event for event in events if event.name == "the steps").time_range
    inside = {e.name for e in events if steps.start <= e.time_range.start and e.time_range.end <= steps.end}
    assert "cudaLaunchKernel" in inside and "cudaMemcpyAsync" in inside
    assert not inside & {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"}
    engine.close()


def test_activations_with_gaps_arrive_on_the_host_whole():
    machine = CudaMachine(torch.device("cuda"))
    host = Host(machine, StoredWeights(None, machine, {}, 0))
    device = Device(host, machine.device)
    whole = torch.randn(4096, 4096, device="cuda")
    gaps = whole[:, 7:3000]
    device.items[Item("a:1.0")] = [gaps]
    device.send(Item("a:1.0"))
    torch.cuda.synchronize()
    assert torch.equal(host.items["a:1.0"][0], gaps.cpu())
    device.free(Item("a:1.0"))
    device.allocate(Item("a:1.0"))
    device.fetch(Item("a:1.0"))
    assert torch.equal(device.items["a:1.0"][0], gaps)
