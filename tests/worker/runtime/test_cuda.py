from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from planner.graph import run_slice
from planner.graph.pieces import Pieces
from tests.support.engine_plans import adamw, chain_of, mixed_plan, resident_plan
from tests.support.engines import data, learning_rate, own_threads
from tests.support.families import masked_batch
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from worker.engine.device_items import Device
from worker.engine.engine import Engine
from worker.engine.host_items import Host
from worker.engine.stored_weights import StoredWeights
from worker.runtime.cuda import CudaMachine

pytestmark = pytest.mark.gpu
on_a_card = pytest.mark.gpu(real=True)
"""On the emulated device tests/worker/runtime/test_late_device.py asks for more."""


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


def both(name, plan_of, *, slices, clip=None, dtype=torch.float32):
    device = torch.device("cuda", torch.cuda.current_device())
    plain, model = make_model(name, dtype).to(device), make_model(name, dtype)
    chain = chain_of(model, device=device)
    settings = {"optimizer": adamw(model), "max_grad_norm": clip}
    plan = plan_of(chain, slices=slices, clip=clip is not None)
    plan = replace(plan, gpu_budget_bytes=0)  # no cap: plain PyTorch has its memory on the same device
    return Engine(model, plan=plan, chain=chain, device=device, **settings), PlainEngine(
        plain, device=device, **settings
    )


def run_both(engine, plain, steps, slices):
    for step in range(steps):
        batches, rest = data(step, slices)
        got = engine.step(batches, learning_rate=learning_rate(step), **rest)
        expected = plain.step(batches, learning_rate=learning_rate(step), **rest)
        yield got, expected


@on_a_card
@pytest.mark.parametrize("clip", [None, 0.5], ids=["free", "clipped"])
@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_resident_plan_equals_plain_pytorch_bitwise(name, slices, clip):
    engine, plain = both(name, resident_plan, slices=slices, clip=clip)
    for got, expected in run_both(engine, plain, 5, slices):
        assert all(torch.equal(a, b) for a, b in zip(got.losses, expected.losses, strict=True))
        assert clip is None or torch.equal(got.grad_norm, expected.grad_norm)
    trained = dict(engine.restore().named_parameters())
    assert all(torch.equal(trained[n], p.cpu()) for n, p in plain.model.named_parameters())
    assert own_threads() == []


@pytest.mark.gpu(real=True)  # PyTorch's kernels for CUDA
@pytest.mark.parametrize("backend", ["EFFICIENT_ATTENTION", "FLASH_ATTENTION", None])
def test_offloaded_activations_of_fused_attention_with_dropout_come_back_whole(backend):
    # Its backward is not deterministic: the forward's losses are compared, and gradients nearly.
    torch.use_deterministic_algorithms(False)
    every = [torch.nn.attention.SDPBackend[name] for name in ("EFFICIENT_ATTENTION", "FLASH_ATTENTION", "MATH")]
    chosen = every if backend is None else [torch.nn.attention.SDPBackend[backend]]
    dtype = torch.bfloat16 if backend == "FLASH_ATTENTION" else torch.float32
    with torch.nn.attention.sdpa_kernel(chosen):
        offload = functools.partial(resident_plan, option="offload")
        engine, plain = both("llama", offload, slices=2, dtype=dtype)
        for step, (got, expected) in enumerate(run_both(engine, plain, 3, 2)):
            for a, b in zip(got.losses, expected.losses, strict=True):
                assert torch.equal(a, b) if step == 0 else torch.allclose(a, b, rtol=1e-2)
    engine.close()


@on_a_card
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("clip", [None, 0.5], ids=["free", "clipped"])
@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_mixed_plan_equals_plain_pytorch_but_for_the_cpus_own_rounding(name, slices, clip, dtype):
    engine, plain = both(name, mixed_plan, slices=slices, clip=clip, dtype=dtype)
    for step, (got, expected) in enumerate(run_both(engine, plain, 10, slices)):
        for a, b in zip(got.losses, expected.losses, strict=True):
            # The first step has seen no update yet.
            assert torch.equal(a, b) if step == 0 else torch.allclose(a, b, rtol=1e-2 if dtype.itemsize == 2 else 1e-4)
    trained = dict(engine.restore().named_parameters())
    for name, p in plain.model.named_parameters():
        assert torch.allclose(trained[name], p.cpu(), rtol=1e-2, atol=1e-3), name


@pytest.mark.long
def test_many_steps_of_a_mixed_plan_lose_no_update_and_no_byte():
    engine, plain = both("llama", mixed_plan, slices=2)
    allocated = []
    for _ in run_both(engine, plain, 12, 2):
        engine.drain()
        allocated.append(torch.cuda.memory_allocated())
    assert len(set(allocated[3:])) == 1
    for (name, got), (_, expected) in zip(engine.state(), plain.state(), strict=True):
        assert torch.allclose(got["master"], expected["master"], rtol=1e-3, atol=1e-4), name
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
@pytest.mark.parametrize("clip", [None, 0.5], ids=["free", "clipped"])
@pytest.mark.parametrize("slices", [1, 4])
def test_a_step_runs_where_waiting_for_the_device_is_an_error(slices, clip, waiting):
    engine, _ = both("llama", mixed_plan, slices=slices, clip=clip)
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
    engine, _ = both("llama", mixed_plan, slices=2, clip=0.5)
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
    device.items["a:1.0"] = [gaps]
    device.send("a:1.0")
    torch.cuda.synchronize()
    assert torch.equal(host.items["a:1.0"][0], gaps.cpu())
    device.free("a:1.0")
    device.allocate("a:1.0")
    device.fetch("a:1.0")
    assert torch.equal(device.items["a:1.0"][0], gaps)
