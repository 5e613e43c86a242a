"""The optimizer's settings, and the values that the updates of one step use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from planner.optimizers.base import Group
from planner.schedule.chain import Chain


def groups_of(optimizer: Group | Sequence[Group], chain: Chain | None = None) -> tuple[Group, ...]:
    """The optimizer's parameter groups as a tuple, whether one `Group` or several are given. Raises ValueError if a
    tensor of `chain` has another optimizer than its group is for."""
    groups = (optimizer,) if isinstance(optimizer, Group) else tuple(optimizer)
    tensors = (*chain.tensors(), *chain.frame_tensors) if chain is not None else ()
    wrong = [
        tensor.name
        for tensor in tensors
        if tensor.trainable
        for group in groups
        if group.has(tensor.name) and not isinstance(tensor.optimizer, group.trains)
    ]
    if wrong:
        raise ValueError(f"the optimizer's groups are not the chain's: {sorted(wrong)[:3]}")
    return groups


@dataclass(slots=True, kw_only=True, eq=False)
class StepValues:
    """The values that the updates of one step read, however late they run: an update on the CPU may run during the next
    step.

    number            number of the step, from 1
    learning_rate     a Python float, as an fp32 tensor would give other bits; for several groups one float each
    groups            the optimizer's settings in this step, one for each parameter group
    host_count, device_count
                      `number` as AdamW reads it (a float32 tensor without dimensions), beside the tensors it updates
    coefficient, host_coefficient
                      the factor by which clipping multiplies gradients; set when their norm is known, None without
                      clipping. Updates on the CPU read `host_coefficient` through `coefficient_on_host`
    coefficient_arrives
                      a function that waits until `host_coefficient` has its value
    grad_norm         the gradients' global norm, before clipping
    reached           the weights of blocks that a gradient has reached so far; the others stay as they are
    updating          whether any update of the step has begun
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
        """The learning rate of parameter group number `group`."""
        return self.learning_rate[group] if isinstance(self.learning_rate, Sequence) else self.learning_rate

    def coefficient_on_host(self) -> Tensor | None:
        """The clipping factor as a host tensor, after waiting until its value has come from the device; None without
        clipping."""
        if self.coefficient_arrives is not None:
            self.coefficient_arrives()
        return self.host_coefficient

    def take_grad_norm(self) -> Tensor | None:
        """Return the gradients' global norm (None without clipping), and drop the values on the device: after the step
        only updates on the CPU still read values."""
        norm, self.grad_norm, self.coefficient = self.grad_norm, None, None
        return norm
