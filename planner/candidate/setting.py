"""The problem that the solver and all candidates for a plan answer: the chain, the machine, budgets and freedoms."""

from __future__ import annotations

from dataclasses import dataclass

from planner.machine.hardware import Hardware
from planner.schedule.chain import Block, Chain, Option


@dataclass(frozen=True, slots=True)
class RateScale:
    """The share of each queue's rate that the solver counts on, since whole tensors waste some of it."""

    h2d: float = 1.0
    d2h: float = 1.0
    cpu: float = 1.0


FULL_RATES = RateScale()


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes the job may use, and the freedoms the solver has."""

    gpu_bytes: int
    cpu_bytes: int
    cpu_updates: bool = True
    activation_offload: bool = True
    rate_scale: RateScale = FULL_RATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all candidates of one problem share. `slices`: slices of a round. `states_anywhere`: which states are on
    disk is still to be decided, whatever the chain's tensors say."""

    chain: Chain
    hardware: Hardware
    budgets: Budgets
    slices: int
    clip: bool
    rounds: int = 1
    states_anywhere: bool = False

    def options(self, block: Block) -> list[Option]:
        """The options the job may use; all of them where activation offload is off and nothing else is left."""
        allowed = [o for o in block.options if self.budgets.activation_offload or not o.offloaded_bytes]
        return allowed or list(block.options)
