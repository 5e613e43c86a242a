"""Host memory: of exact size, made once, let go of when the engine ends."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.schedule.items import Item
from planner.schedule.memory_use import cpu_parts
from tests.support.engine_plans import adamw, chain_of, mixed_plan
from tests.support.tiny_models import batch_of, make_model
from worker.engine.device_items import Device
from worker.engine.engine import Engine
from worker.engine.host_items import Host
from worker.engine.stored_weights import StoredWeights
from worker.runtime.cpu import CpuMachine

torch.set_num_threads(1)
CPU = torch.device("cpu")


def step(engine: Engine) -> None:
    engine.step([batch_of(k) for k in range(2)], seeds=[0, 1], learning_rate=1e-2)
    engine.drain()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    model = make_model("llama", request.param)
    chain = chain_of(model)
    plan = mixed_plan(chain, slices=2, clip=True)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=0.5, device=CPU)
    engine.host_bytes = cpu_parts(plan, chain).total_bytes
    step(engine)
    yield engine
    engine.close()


def storages(host: Host) -> dict[int, int]:
    """Bytes by address of all memory behind the items."""
    found = [t.untyped_storage() for tensors in host.items.values() for t in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@pytest.mark.sweep(2)
def test_the_host_has_what_the_plan_says_up_to_a_page_per_tensor(engine: Engine) -> None:
    found = storages(engine._weights.host)
    assert all(size % mmap.PAGESIZE == 0 for size in found.values())
    assert len(found) <= len(list(engine._model.parameters())) + 2  # a slab for each, and one per offloaded slice
    assert engine.host_bytes <= sum(found.values()) <= engine.host_bytes + mmap.PAGESIZE * len(found)


@pytest.mark.sweep(2)
def test_steps_use_the_memory_of_the_first_one(engine: Engine) -> None:
    before = storages(engine._weights.host)
    step(engine)
    assert storages(engine._weights.host) == before


@pytest.mark.sweep(2)
def test_gradients_take_the_place_of_weights_that_have_a_master(engine: Engine) -> None:
    items = engine._weights.host.items
    gradients = [item for item in items if item[0] == "g"]
    assert gradients
    for item in gradients:
        weight, states = items[f"w:{item[2:]}"][0], items[f"s:{item[2:]}"]
        assert (items[item][0].data_ptr() == weight.data_ptr()) == (len(states) == 3)


@pytest.mark.sweep(2)
def test_what_is_restored_holds_no_more_than_its_weights(engine: Engine) -> None:
    host = engine._weights.host
    model = engine.restore()
    assert not host.items
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


class Copies(TorchDispatchMode):
    """Writes down what is copied, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._foreach_copy_.default:
            self.calls.append([*args[0], *args[1]])
        assert func is not torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_activations_of_any_layout_travel_in_one_piece_and_come_back_as_they_were():
    # PyTorch copies a tensor with gaps by way of another one, which it empties before a GPU has filled it.
    whole = torch.arange(240.0)
    layouts = [whole[:24].view(4, 6).t(), whole[24:84].view(5, 12)[:, 3:9], whole[84:87].expand(7, 3), whole[:0]]
    machine = CpuMachine(metered=False)
    host = Host(machine, StoredWeights(None, machine, {}, 0))
    device = Device(host, CPU)
    device.items[Item("a:1.0")] = list(layouts)
    with Copies() as copies:
        device.send(Item("a:1.0"))
        device.free(Item("a:1.0"))
        device.allocate(Item("a:1.0"))
        device.fetch(Item("a:1.0"))
    assert [len(tensors) for tensors in copies.calls] == [8, 8]
    assert all(torch.ops.aten.is_non_overlapping_and_dense.default(t) for tensors in copies.calls for t in tensors)
    for there, before in zip(device.items["a:1.0"], layouts, strict=True):
        assert torch.equal(there, before) and there.stride() == before.stride()
