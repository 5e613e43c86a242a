"""The optimizer's settings, and the values that the updates of one step use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from planner.muon import MATCH_RMS, MOMENTUM
from planner.schedule.chain import Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What any optimizer knows of its tensors. Those in `decay_names` decay by `weight_decay`, others do not.

    `names`: as one of several parameter groups, the tensors that are its own; None: all.
    """

    weight_decay: float
    decay_names: frozenset[str]
    names: frozenset[str] | None = None

    def has(self, name: str) -> bool:
        """Whether a tensor is its own."""
        return self.names is None or name in self.names

    def decay_of(self, name: str) -> float:
        """The weight decay of one tensor."""
        return self.weight_decay if name in self.decay_names else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Group):
    """AdamW as PyTorch defines it."""

    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(Group):
    """Muon as PyTorch defines it (`planner.cpu.muon`), for matrices. `adjust`: its `adjust_lr_fn`."""

    momentum: float = MOMENTUM
    adjust: str = MATCH_RMS


def groups_of(optimizer: Group | Sequence[Group], chain: Chain | None = None) -> tuple[Group, ...]:
    """Parameter groups; one where there are none. Raises ValueError where Muon's are not the matrices of `chain`."""
    groups = (optimizer,) if isinstance(optimizer, Group) else tuple(optimizer)
    tensors = (*chain.tensors(), *chain.frame_tensors) if chain is not None else ()
    matrices = matrices_of(groups, [t.name for t in tensors if t.trainable])
    if wrong := matrices ^ {t.name for t in tensors if t.is_matrix}:
        raise ValueError(f"the optimizer's matrices are not the chain's: {sorted(wrong)[:3]}")
    return groups


def matrices_of(groups: Sequence[Group], names: Iterable[str]) -> frozenset[str]:
    """Those of the tensors called `names` that Muon updates."""
    muon = [group for group in groups if isinstance(group, Muon)]
    return frozenset(name for name in names if any(group.has(name) for group in muon))


@dataclass(slots=True, kw_only=True, eq=False)
class StepValues:
    """What the updates of one step read, however late they run: a carried one runs during the step after.

    number            of the step, from 1
    learning_rate     a Python float: as an fp32 tensor it would give other bits; for several groups one of each
    groups            the optimizer's settings in this step, one for each parameter group
    host_count, device_count
                      `number` as AdamW reads it (a float32 tensor without dimensions), beside the tensors it updates
    coefficient, host_coefficient
                      what gradients are multiplied by; set when the gradients' norm is known, None without clipping.
                      Updates on the CPU read the latter by `coefficient_on_host`
    coefficient_arrives
                      waits until `host_coefficient` is there
    grad_norm         the gradients' global norm, before clipping
    reached           the weights of blocks that a gradient has reached so far; the others stay as they are
    updating          whether one of the updates has begun
    """

    number: int
    learning_rate: float | Sequence[float]
    host_count: Tensor
    device_count: Tensor
    groups: tuple[Group, ...] = ()
    coefficient: Tensor | None = None
    host_coefficient: Tensor | None = None
    coefficient_arrives: Callable[[], None] | None = None
    grad_norm: Tensor | None = None
    reached: set[str] = field(default_factory=set)
    updating: bool = False

    def rate_of(self, group: int) -> float:
        """The learning rate of a group, by its number."""
        return self.learning_rate[group] if isinstance(self.learning_rate, Sequence) else self.learning_rate

    def coefficient_on_host(self) -> Tensor | None:
        """`host_coefficient`, when it is there."""
        if self.coefficient_arrives is not None:
            self.coefficient_arrives()
        return self.host_coefficient

    def take_grad_norm(self) -> Tensor | None:
        """The norm; when the step is over, only the CPU's updates still need these values."""
        norm, self.grad_norm, self.coefficient = self.grad_norm, None, None
        return norm
