"""The optimizer's settings, and the values that the updates of one step use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """AdamW as PyTorch defines it. Tensors in `decay_names` decay by `weight_decay`, others do not.

    `names`: as one of several parameter groups, the tensors that are its own; None: all.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decay_names: frozenset[str]
    names: frozenset[str] | None = None

    def has(self, name: str) -> bool:
        """Whether a tensor is its own."""
        return self.names is None or name in self.names

    def decay_of(self, name: str) -> float:
        """The weight decay of one tensor."""
        return self.weight_decay if name in self.decay_names else 0.0


def groups_of(optimizer: AdamW | Sequence[AdamW]) -> tuple[AdamW, ...]:
    """Parameter groups; one where there are none."""
    return (optimizer,) if isinstance(optimizer, AdamW) else tuple(optimizer)


@dataclass(slots=True, kw_only=True, eq=False)
class StepValues:
    """What the updates of one step read, however late they run: a carried one runs during the step after.

    number            of the step, from 1
    learning_rate     a Python float: as an fp32 tensor it would give other bits; for several groups one of each
    groups            the optimizer's settings in this step, one for each parameter group
    host_count, device_count
                      `number` as AdamW reads it (a float32 tensor without dimensions), beside the tensors it updates
    coefficient, host_coefficient
                      what gradients are multiplied by; set when the gradients' norm is known, None without clipping
    grad_norm         the gradients' global norm, before clipping
    reached           the weights of blocks that a gradient has reached so far; the others stay as they are
    updating          whether one of the updates has begun
    """

    number: int
    learning_rate: float | Sequence[float]
    host_count: Tensor
    device_count: Tensor
    groups: tuple[AdamW, ...] = ()
    coefficient: Tensor | None = None
    host_coefficient: Tensor | None = None
    grad_norm: Tensor | None = None
    reached: set[str] = field(default_factory=set)
    updating: bool = False

    def rate_of(self, group: int) -> float:
        """The learning rate of a group, by its number."""
        return self.learning_rate[group] if isinstance(self.learning_rate, Sequence) else self.learning_rate

    def take_grad_norm(self) -> Tensor | None:
        """The norm; when the step is over, only the CPU's updates still need these values."""
        norm, self.grad_norm, self.coefficient = self.grad_norm, None, None
        return norm
