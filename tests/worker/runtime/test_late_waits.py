"""A wait for the device inside a step is found, whatever kind it is of; those that are stated are in the docs.

That steps wait nowhere else is asked wherever engines train on the emulated device (tests/support/late_waits.py).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests import ROOT
from tests.support.cuda.device import Device
from tests.support.engines import data, learning_rate
from tests.support.late_engines import CUDA, Case, engine_for
from tests.support.late_waits import FIRST, STATED, a_step, unstated
from worker.engine.block_calls import Call

pytestmark = pytest.mark.emulated
MEMORY = torch.empty(1024)
PLANTED: dict[str, Callable[[], object]] = {
    "synchronize": torch.cuda.synchronize,
    "Stream.synchronize": lambda: torch.cuda.current_stream().synchronize(),
    "Event.synchronize": lambda: torch.cuda.current_stream().record_event().synchronize(),
    "aten::_local_scalar_dense": lambda: torch.rand((), device=CUDA).item(),
    "copy to the host": lambda: torch.ones(3, device=CUDA).cpu(),
    "copy of pageable memory to the device": lambda: torch.ones(3).to(CUDA, non_blocking=True),
    "cudaHostAlloc": lambda: torch.ones(5_000_000).pin_memory(),
    "cudaHostRegister": lambda: torch.cuda.cudart().cudaHostRegister(MEMORY.data_ptr(), MEMORY.nbytes, 0),
}


def test_every_kind_of_wait_that_is_planted_in_a_step_is_found(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llama", "mixed", clip=0.5)
    forward, left = Call.forward, dict(PLANTED)

    def waiting(self: Call, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        while left and engine.steps_done:
            left.popitem()[1]()
        return forward(self, tensors)

    monkeypatch.setattr(Call, "forward", waiting)
    engine = engine_for(case)
    try:
        with pytest.raises(AssertionError, match=r"Stream\.synchronize"):
            for step in range(2):
                batches, rest = data(step, 1)
                with a_step(device, first=step == 0):
                    engine.step(batches, learning_rate=learning_rate(step), **rest)
        found = unstated(device.waits, first=True)  # before the engine ends, which waits
    finally:
        engine.close()
    assert not left
    assert {wait.what for wait in found} == set(PLANTED)


def test_the_documentation_states_each_wait_of_a_step() -> None:
    said = " ".join((ROOT / "docs/explanation/a-step.md").read_text("utf-8").split())
    for reason in (*STATED.values(), *FIRST.values()):
        assert reason in said
