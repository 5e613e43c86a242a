"""Finds which rows of a weight that embedding and head share get a gradient from the embedding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from planner.schedule.chain import Chain
from planner.schedule.peak_moments import distinct_tokens
from planner.schedule.plan import Plan
from worker.runtime.machine import Machine


class SharedRows:
    """The trained weights that only the first and the last block share (a tied embedding and head), and the token ids
    of a step's slices.

    names   the names of these weights; empty if a step has one slice, since its gradients arrive in plain order
    """

    def __init__(self, plan: Plan, chain: Chain, machine: Machine, *, trained: Collection[str]) -> None:
        """`trained`: the names of the tensors that get gradients."""
        self._machine, self._distinct_tokens = machine, distinct_tokens(chain, plan.slices)
        self.names: frozenset[str] = frozenset()
        if plan.slices * plan.rounds > 1:
            ends = 0, len(chain.blocks) - 1
            self.names = frozenset(name for name, users in chain.users().items() if users == ends and name in trained)

    def tokens(self, batches: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """For each slice of a round, the distinct token ids in all its slices up to this one; an empty list if `names`
        is empty. Raises ValueError when there are more of them than the plan has memory for."""
        if not self.names:
            return []
        rows: list[Tensor] = []
        seen = torch.empty(0, dtype=torch.int64)
        with self._machine.on_host():
            for batch, planned in zip(batches, self._distinct_tokens, strict=True):
                seen = torch.unique(torch.cat([seen, batch["input_ids"].flatten()]))
                if len(seen) > planned:
                    raise ValueError(f"{len(seen)} distinct tokens up to slice {len(rows)}; planned were {planned}")
                rows.append(seen)
        return rows
