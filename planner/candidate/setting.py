"""Defines the problem that the solver and all candidates solve: chain, machine, budgets, and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass

from planner.machine.hardware import Hardware
from planner.schedule.chain import Block, Chain, Option


@dataclass(frozen=True, slots=True)
class RateScale:
    """The share (0 to 1) of each queue's rate on which the solver counts, because whole tensors waste some of it."""

    h2d: float = 1.0
    d2h: float = 1.0
    cpu: float = 1.0


FULL_RATES = RateScale()


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes that the job may use on the device and on the host, and restrictions on the plan: `cpu_updates` and
    `activation_offload` are False where a plan may have none; `rate_scale` reduces the machine's rates."""

    gpu_bytes: int
    cpu_bytes: int
    cpu_updates: bool = True
    activation_offload: bool = True
    rate_scale: RateScale = FULL_RATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all candidates for one plan share. `slices`: micro-batches of a round. `clip`: gradients are clipped by
    their global norm. `states_anywhere`: the solver decides which optimizer states are on disk, whatever the chain's
    tensors say."""

    chain: Chain
    hardware: Hardware
    budgets: Budgets
    slices: int
    clip: bool
    rounds: int = 1
    states_anywhere: bool = False

    def options(self, block: Block) -> list[Option]:
        """The options that the job may use for `block`. If activation offload is not allowed, those that offload are
        left out, unless no others are left."""
        allowed = [o for o in block.options if self.budgets.activation_offload or not o.offloaded_bytes]
        return allowed or list(block.options)
