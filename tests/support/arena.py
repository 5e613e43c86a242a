"""The arena as the allocator of the emulated device, for a test; and chains whose tensors have places in it."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from dataclasses import replace

import torch

from planner.arrange.pack import with_places
from planner.graph import ask_allocator
from planner.graph.scratch import History
from planner.optimizers.muon import Muon
from planner.optimizers.table import NONE
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from tests.support.cuda.device import Device
from tests.support.engine_plans import chain_of, rounded_of
from tests.support.tiny_models import make_model
from worker.runtime import arena

CUDA = torch.device("cuda")


@contextlib.contextmanager
def arena_on(device: Device) -> Iterator[arena.Arena]:
    """Inside, the device's memory is the arena's, as in a process that has just begun."""
    gc.collect()
    device.reap()  # what engines of other tests have left
    device.initialized = False
    found = arena.take_over()
    assert found is not None
    found.empty()
    found.reset_peaks()
    try:
        yield found
    finally:
        found.close()
        found.set_limit(None)
        arena._arena = None
        device.plugged = None
        ask_allocator(History())


@functools.cache
def placed_chain(model: str, dtype: torch.dtype, rounded: bool = False, muon: bool = False) -> Chain:
    """As `late_engines.chain_for`, with what turns allocate."""
    made = make_model(model, dtype)
    optimizers = Muon.chosen(made) if muon else rounded_of(made) if rounded else NONE
    return chain_of(made, device=CUDA, arranged=True, optimizers=optimizers)


def placed(plan: Plan, chain: Chain) -> Plan:
    """With places, and a budget of exactly what they take."""
    found = with_places(plan, chain)
    return replace(found, gpu_budget_bytes=found.gpu_peak_bytes)
