"""Which optimizers there are, and what jobs call them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from planner.optimizers.adamw import AdamW, AdamWGroup
from planner.optimizers.adamw_8bit import AdamW8bit
from planner.optimizers.base import Group, Optimizer
from planner.optimizers.muon import Muon, MuonGroup

AnyOptimizer = AdamW | AdamW8bit | Muon
Optim = Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit", "muon"]
OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    "adamw_torch_fused": AdamW,
    "adamw_torch": AdamW,
    "adamw_8bit": AdamW8bit,
    "muon": Muon,
}
"""Value of a job's `optim` -> the kind. AdamW trains the parameters that the kind does not."""
GROUPS: tuple[type[Group], ...] = (AdamWGroup, MuonGroup)
"""Parameter groups that PyTorch's optimizers may have."""
*_FIRST, _LAST = OPTIMIZERS
CHOICES = f"{', '.join(_FIRST)} or {_LAST}"
OPTIMIZER_KEYS = frozenset(key for kind in OPTIMIZERS.values() for key in kind.keys)
"""Keys of a job that only one kind reads."""
ADAMW = AdamW()
NONE: Mapping[str, AnyOptimizer] = MappingProxyType({})
"""No parameter has another optimizer than AdamW."""
