"""AdamW(fused=True) with fp32 moments: PyTorch's own kernel on the device, `planner.cpu.adamw` on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from planner.cpu.eight_bits import CHUNK
from planner.optimizers.base import Group, NotUsable, Optimizer, check_not_negative

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from planner.cpu.adamw import Step, Target
    from planner.cpu.rounded import Numbers

    Known = tuple[Numbers, Numbers] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Optimizer):
    """AdamW as PyTorch's fused kernel computes it."""

    kind: ClassVar[str] = "adamw"
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    states: ClassVar[str] = "AdamW's states"
    on_disk: ClassVar[bool] = True
    packs: ClassVar[bool] = True
    ahead: ClassVar[bool] = True

    def moment_bytes(self, elements: int) -> tuple[int, ...]:
        """Two moments in fp32."""
        return 4 * elements, 4 * elements

    def scratch_bytes(self, elements: int, *, narrow: bool) -> int:
        """A narrow gradient's copy in fp32."""
        return 4 * elements * narrow


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWGroup(Group):
    """AdamW's settings, as PyTorch defines them."""

    trains: ClassVar[type[Optimizer]] = AdamW
    pytorch: ClassVar[str] = "AdamW"

    betas: tuple[float, float]
    eps: float

    @classmethod
    def from_pytorch(cls, settings: Mapping[str, Any], names: frozenset[str]) -> Self:
        """The group of these `names` with the settings of a param_group of `torch.optim.AdamW`. Raises NotUsable for
        settings that the fused kernel does not have, and for values out of range."""
        for switch in ("amsgrad", "maximize", "differentiable"):
            if settings[switch]:
                raise NotUsable(f"it has {switch}=True", f"leave {switch} out")
        if not settings["fused"]:
            number = "it is not fused, and updates are those of the fused one: last bits differ"
            raise NotUsable(number, "torch.optim.AdamW(..., fused=True)")
        if not settings["decoupled_weight_decay"]:
            raise NotUsable("its weight decay is not decoupled", "use torch.optim.AdamW as it is")
        beta1, beta2 = (float(beta) for beta in settings["betas"])
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):  # AdamW checks this itself, but only when it is made
            raise NotUsable(f"its betas are {beta1} and {beta2}", "each must be at least 0 and less than 1")
        check_not_negative(settings, "lr", "eps", "weight_decay")
        return cls(
            betas=(beta1, beta2),
            eps=float(settings["eps"]),
            weight_decay=float(settings["weight_decay"]),
            decay_names=names,
            names=names,
        )

    def optimizer_of(self, weight: Tensor) -> Optimizer:
        """AdamW with fp32 moments."""
        return AdamW()

    def target(self, name: str, work: Tensor, states: Sequence[Tensor], gradient: Tensor) -> Target:
        """The parameter `name` to update. `states`: its two moments, then its fp32 master where it has one."""
        from planner.cpu.adamw import Target

        exp_avg, exp_avg_sq, *masters = states
        master = masters[0] if masters else work
        return Target(name, self.decay_of(name), work, master, exp_avg, exp_avg_sq, gradient)

    def update(
        self,
        targets: Sequence[Target],
        *,
        learning_rate: float,
        count: Tensor,
        coefficient: Tensor | None,
        constants: Any = None,
    ) -> None:
        """One AdamW step on `targets`, all on one device. `count`: the step's number; `coefficient`: the factor for the
        gradients, None without clipping; both are float32 tensors without dimensions. `constants`: what
        `AdamW8bit.constants` gave for that device."""
        from planner.cpu.adamw import Step

        step = Step(learning_rate=learning_rate, betas=self.betas, eps=self.eps, count=count, coefficient=coefficient)
        update(targets, step, constants)

    def of_pytorch(self, parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """`torch.optim.AdamW(fused=True)` with these settings. `parameters`: its param_groups."""
        import torch

        return torch.optim.AdamW(parameters, betas=self.betas, eps=self.eps, fused=True)


# ---- in tensors


def update(targets: Sequence[Target], step: Step, known: Known = None) -> None:
    """One AdamW step on `targets`, all of them on one device. `known`: where moments are in 8 bits, the numbers that
    their bytes stand for, on that device."""
    from planner.cpu.adamw import cpu_kernel

    if targets and targets[0].master.device.type == "cpu":
        cpu_kernel().update(targets, step)
    else:
        update_in_lists(targets, step, known)


def update_in_lists(targets: Sequence[Target], step: Step, known: Known = None) -> None:
    """One AdamW step by PyTorch's kernel, in as few calls as memory allows, since each call starts work on the GPU. A
    gradient as wide as the master is scaled in place.

    The kernel gets lists of tensors, never concatenations: it computes the last elements of each tensor on another
    path. Targets whose moments are in 8 bits come last, one after the other, in chunks.
    """
    import torch

    from planner.cpu.adamw import fused, update_rounded

    for batch in _batches([target for target in targets if not target.rounded]):
        gradients = [t.gradient.to(t.master.dtype) for t in batch]  # the same tensor where it is as wide
        if step.coefficient is not None:
            torch._foreach_mul_(gradients, step.coefficient)
        for decay in dict.fromkeys(t.weight_decay for t in batch):
            chosen = [i for i, t in enumerate(batch) if t.weight_decay == decay]
            fused(
                [batch[i].master for i in chosen],
                [gradients[i] for i in chosen],
                [batch[i].exp_avg for i in chosen],
                [batch[i].exp_avg_sq for i in chosen],
                step,
                decay,
            )
        del gradients
        for target in batch:
            if target.work is not target.master:
                target.work.copy_(target.master)
    for target in (target for target in targets if target.rounded):
        assert known is not None
        update_rounded(target, step, CHUNK, known)


def _batches(targets: Sequence[Target]) -> Iterator[Sequence[Target]]:
    """Groups of targets that are updated in one call. The fp32 gradients of a group together are not larger than the
    largest one alone, which is what the plan has memory for. Gradients as wide as the master need no copy."""
    sizes = [t.master.nbytes if t.gradient.dtype != t.master.dtype else 0 for t in targets]
    limit, start, total = max(sizes, default=0), 0, 0
    for i, size in enumerate(sizes):
        if total + size > limit:
            yield targets[start:i]
            start, total = i, 0
        total += size
    if targets:
        yield targets[start:]
