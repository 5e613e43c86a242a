"""Host memory: of exact size, made once, let go of when the engine ends."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch

from planner.memory import cpu_parts
from tests.engine_plans import adamw, chain_of, mixed_plan
from tests.tiny_models import batch_of, make_model
from worker.engine import Engine
from worker.host import Host

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


def test_the_host_has_what_the_plan_says_up_to_a_page_per_tensor(engine: Engine) -> None:
    found = storages(engine._weights.host)
    assert all(size % mmap.PAGESIZE == 0 for size in found.values())
    assert len(found) <= len(list(engine._model.parameters())) + 2  # a slab for each, and one per offloaded slice
    assert engine.host_bytes <= sum(found.values()) <= engine.host_bytes + mmap.PAGESIZE * len(found)


def test_steps_use_the_memory_of_the_first_one(engine: Engine) -> None:
    before = storages(engine._weights.host)
    step(engine)
    assert storages(engine._weights.host) == before


def test_gradients_take_the_place_of_weights_that_have_a_master(engine: Engine) -> None:
    items = engine._weights.host.items
    gradients = [item for item in items if item[0] == "g"]
    assert gradients
    for item in gradients:
        weight, states = items[f"w:{item[2:]}"][0], items[f"s:{item[2:]}"]
        assert (items[item][0].data_ptr() == weight.data_ptr()) == (len(states) == 3)


def test_what_is_restored_holds_no_more_than_its_weights(engine: Engine) -> None:
    host = engine._weights.host
    model = engine.restore()
    assert not host.items
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
