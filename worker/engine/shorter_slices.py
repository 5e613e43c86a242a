"""Finds which tensors slices (micro-batches) with shorter rows than the plan's allocate, so that these too get places
in the plan's memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from planner.errors import UserError
from planner.graph import EAGER, BlockNames, Recipe, items_for, with_areas_of
from planner.measure.frame_lifetimes import lifetimes_of
from planner.schedule.chain import Chain, Lifetimes
from planner.schedule.plan import Plan
from worker.engine.block_calls import ModelBlock
from worker.runtime.arena import Memory, Shape

log = logging.getLogger(__name__)

_ITEMS = 10_007  # num_items_in_batch, as in the analysis of a model


class ShorterSlices:
    """Tells the device's memory, before each step, which shapes its slices (micro-batches) have."""

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        chain: Chain,
        blocks: Sequence[ModelBlock],
        memory: Memory,
        device: torch.device,
    ) -> None:
        self._model, self._chain, self._blocks, self._memory, self._device = model, chain, blocks, memory, device
        names = [block.name for block in chain.blocks]
        kinds = tuple(block.kind for block in chain.blocks)
        self._names = BlockNames(embedding=names[0], layers=tuple(names[1:-1]), head=names[-1], kinds=kinds)
        self._recipes: dict[str, dict[str, Recipe]] = {}
        for kind, block, option in zip(kinds, blocks, plan.options, strict=True):
            self._recipes.setdefault(kind, {})[option] = block.recipe

    def expect(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Prepare the device's memory for a step with the slices `batches`. A slice of a new shape is analysed first,
        which takes seconds."""
        shapes = [_shape(batch) for batch in batches]
        for batch, shape in zip(batches, shapes, strict=True):
            if not self._memory.knows(shape):
                self._memory.learn(shape, self._chain_of(batch))
        self._memory.slices(shapes)

    def _chain_of(self, batch: Mapping[str, Tensor]) -> Chain | None:
        """The chain with the lifetimes of a slice like `batch`; None if they cannot be found. What a layer's own code
        allocates keeps the area that it has in the plan."""
        recipes = {kind: tuple(its.values()) for kind, its in self._recipes.items()}
        try:
            with contextlib.ExitStack() as stack:
                for block in self._blocks:
                    stack.enter_context(block.own_forward())
                lifetimes, frame = lifetimes_of(
                    self._model,
                    self._names,
                    recipes,
                    batch,
                    self._device,
                    items_for(self._model, _ITEMS),
                    chunk_rows=self._blocks[-1].chunk_rows,
                )
        except UserError as error:  # where the computing of the slice needs it, it raises again
            log.info("device: no places of their own for slices of shape %s: %s", _shape(batch), error)
            return None
        planned = {(each.kind, each.option): each for each in self._chain.lifetimes}
        with_areas = tuple(_with_areas(each, planned[each.kind, each.option]) for each in lifetimes)
        return replace(self._chain, lifetimes=with_areas, frame_lifetimes=frame)


def _with_areas(lifetimes: Lifetimes, planned: Lifetimes) -> Lifetimes:
    if lifetimes.option != EAGER.name:
        return lifetimes
    forward, backward = ((lifetimes.forward, planned.forward), (lifetimes.backward, planned.backward))
    return replace(lifetimes, forward=with_areas_of(*forward), backward=with_areas_of(*backward))


def _shape(batch: Mapping[str, Tensor]) -> Shape:
    return tuple((name, tuple(tensor.shape)) for name, tensor in sorted(batch.items()))
