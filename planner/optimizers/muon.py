"""Muon on matrices, bit for bit as `torch.optim.Muon` computes it, in memory of known size.

The method is that of Jordan et al. (2024) as `torch.optim.Muon` has it: five steps of a Newton-Schulz iteration in bf16
make the momentum orthogonal. The step along it may have the size of an AdamW step (Liu et al., 2025, equation 4). Each
operation is PyTorch's, on tensors laid out as in PyTorch's optimizer, since the last bits depend on the layout. Only
the memory of the results is ours. Therefore a matrix is never cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from planner.checks import check_numbers
from planner.machine.hardware import Hardware
from planner.machine.traffic import UPDATE_TRAFFIC_BYTES
from planner.optimizers.base import Group, NotUsable, Optimizer, check_not_negative

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

STEPS = 5
"""Steps of the iteration."""
COEFFICIENTS = (3.4445, -4.775, 2.0315)
EPS = 1e-7
MOMENTUM = 0.95
ADJUST = "muon_adjust_lr_fn"
"""The job's key that says how the learning rate is adjusted."""
Adjust = Literal["match_rms_adamw", "original"]
MATCH_RMS, ORIGINAL = get_args(Adjust)
"""The learning rate's factor: 0.2 √(longer side) for MATCH_RMS; √(rows / columns), at least 1, for ORIGINAL."""
_AS_THEY_ARE = {"nesterov": True, "ns_steps": STEPS, "ns_coefficients": COEFFICIENTS, "eps": EPS}
TRAFFIC_BYTES = 90
"""Bytes that an update reads and writes per element, roughly: gradient, momentum and weight in fp32, the operands of
the products in bf16."""
CALLS = 30
"""Operations of one update, roughly."""
_CALL_S = 5e-6
_CPU_FLOPS_PER_S = 4e11
"""Rate of bf16 products on a usual desktop's processor. A core with AVX-512 was seen to do 90 to 370 GFLOP/s. Cores
without it convert what they multiply, and do a quarter of that."""
_MOST_FLOPS = {"cpu": 2e10, "cuda": 1e13}  # the most that is measured: larger matrices are taken to be as fast
_ALIGNED = 512


def flops(side: int, elements: int) -> int:
    """Operations in the products of one update; `side` is the matrix' shorter side. Each step computes X Xᵀ, its
    square, and the product of a sum of these with X."""
    return STEPS * (4 * side * elements + 2 * side**3)


def scratch_parts(side: int, elements: int, *, narrow: bool) -> tuple[int, ...]:
    """Bytes of each part that an update needs beside the tensor: the gradient in fp32 where it is `narrow`; in bf16 the
    matrix, X Xᵀ and the factor made of it; and the norm."""
    parts = (4 * elements * narrow, 2 * elements, 2 * side * side, 2 * side * side, 2)
    return tuple(-(-part // _ALIGNED) * _ALIGNED for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(Optimizer):
    """Muon for a matrix with this `shorter_side`. `gpu_s`, `cpu_s`: seconds of its update on the device and on the
    CPU."""

    kind: ClassVar[str] = "muon"
    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    states: ClassVar[str] = "Muon's states"
    # `ahead` stays False: repeating an update would repeat the products
    together: ClassVar[bool] = False
    own_seconds: ClassVar[bool] = True  # they grow faster than elements
    host_scratch: ClassVar[str] = "Muon's products"
    keys: ClassVar[tuple[str, ...]] = (ADJUST,)
    one_rate: ClassVar[bool] = True
    log: ClassVar[str] = "Muon for {:.1f}% of the trained parameters, AdamW for the rest"

    shorter_side: int
    gpu_s: float = 0.0
    cpu_s: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self)
        if not self.shorter_side:
            raise ValueError("a matrix has a shorter_side of at least 1")

    def timed(self, *, gpu_s: float, cpu_s: float) -> Self:
        """This optimizer with measured or estimated seconds of an update on the device and on the CPU."""
        return replace(self, gpu_s=gpu_s, cpu_s=cpu_s)

    def moment_bytes(self, elements: int) -> tuple[int, ...]:
        """A momentum in fp32."""
        return (4 * elements,)

    def scratch_bytes(self, elements: int, *, narrow: bool) -> int:
        """Bytes of the parts of `scratch_parts`."""
        return sum(scratch_parts(self.shorter_side, elements, narrow=narrow))

    def host_scratch_bytes(self, elements: int, *, narrow: bool) -> int:
        """Bytes that an update on the CPU needs: those of `scratch_parts`, as on the device."""
        return self.scratch_bytes(elements, narrow=narrow)

    @classmethod
    def notes(cls, values: Mapping[str, Any]) -> Iterator[str]:
        """Notes for the user on learning rates under Muon, and on gradient clipping in full fine-tuning."""
        adjust = values[ADJUST]
        rates = "rates of AdamW" if adjust == MATCH_RMS else "rates of Muon, about 0.02"
        yield f"optim: muon trains matrices, AdamW the rest; {ADJUST}: {adjust} is for {rates}."
        if values["method"] == "full" and values["max_grad_norm"] is not None:
            slow = "what the GPU has no room for waits for the norm on the CPU, which is slow at it"
            yield f"optim: muon with max_grad_norm: {slow}; max_grad_norm: 0 leaves it to the GPU."

    @classmethod
    def groups(cls, settings: Group, model: nn.Module, values: Mapping[str, Any]) -> tuple[Group, ...]:
        """AdamW's group for the other parameters, and Muon's for matrices."""
        matrices = frozenset(cls.chosen(model))
        others = frozenset(name for name, _ in model.named_parameters()) - matrices
        muon = MuonGroup(
            weight_decay=settings.weight_decay, decay_names=settings.decay_names, names=matrices, adjust=values[ADJUST]
        )
        return replace(settings, names=others), muon

    @classmethod
    def chosen(cls, model: nn.Module) -> Mapping[str, Any]:
        """All matrices except those of embeddings and of the head, which are recognized by their module and, as in
        LLaMA-Factory and axolotl, by name."""
        from torch import nn

        head = getattr(model, "get_output_embeddings", lambda: None)() or getattr(model, "score", None)
        outer = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
        apart = {id(p) for module in outer for p in module.parameters()}
        return {
            name: cls(shorter_side=min(p.shape))
            for name, p in model.named_parameters()
            if p.dim() == 2 and id(p) not in apart and not any(word in name for word in ("embed", "lm_head"))
        }

    def estimated(self, elements: int, hardware: Hardware) -> Self:
        """This optimizer with seconds estimated from the update's arithmetic and memory traffic."""

        def seconds(parameters_per_s: float, flops_per_s: float) -> float:
            moving = TRAFFIC_BYTES * elements / (UPDATE_TRAFFIC_BYTES * parameters_per_s)
            computing = flops(self.shorter_side, elements) / flops_per_s if flops_per_s else 0.0
            return max(CALLS * _CALL_S, moving + computing)

        return self.timed(
            gpu_s=seconds(hardware.gpu_update_parameters_per_s, hardware.flops_per_s),
            cpu_s=seconds(hardware.cpu_update_parameters_per_s, _CPU_FLOPS_PER_S),
        )

    def trial(self, elements: int, device: torch.device) -> tuple[Callable[[], None], float]:
        """See `Optimizer.trial`. If the update of a matrix with these sides takes long, a smaller one is updated,
        and the factor is the ratio of the arithmetic."""
        import torch

        side, longer = self.shorter_side, elements // self.shorter_side
        while side > 1 and flops(side, side * longer) > _MOST_FLOPS[device.type]:
            side, longer = side // 2, longer // 2
        weight, momentum, gradient = (torch.randn(side, longer, device=device) for _ in range(3))
        matrix = Matrix("probe", 0.1, weight, weight, momentum, gradient)
        return (
            lambda: update(matrix, learning_rate=1e-3, momentum=MOMENTUM),
            flops(self.shorter_side, elements) / flops(side, side * longer),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonGroup(Group):
    """Muon's settings, as PyTorch defines them. `adjust`: its `adjust_lr_fn`."""

    trains: ClassVar[type[Optimizer]] = Muon
    pytorch: ClassVar[str] = "Muon"

    momentum: float = MOMENTUM
    adjust: str = MATCH_RMS

    @classmethod
    def from_pytorch(cls, settings: Mapping[str, Any], names: frozenset[str]) -> Self:
        """The group of these `names` with the settings of a param_group of `torch.optim.Muon`. Raises NotUsable where
        a setting has another value than `_AS_THEY_ARE`, or is below 0."""
        for key, value in _AS_THEY_ARE.items():
            if settings[key] != value:
                raise NotUsable(f"its {key} is {settings[key]}", f"leave {key} out: it is {value}")
        check_not_negative(settings, "lr", "weight_decay", "momentum")
        return cls(
            momentum=float(settings["momentum"]),
            adjust=settings["adjust_lr_fn"] or ORIGINAL,
            weight_decay=float(settings["weight_decay"]),
            decay_names=names,
            names=names,
        )

    def optimizer_of(self, weight: Tensor) -> Optimizer:
        """Muon for a matrix of the weight's shape."""
        return Muon(shorter_side=min(weight.shape))

    def target(self, name: str, work: Tensor, states: Sequence[Tensor], gradient: Tensor) -> Matrix:
        """The matrix `name` to update. `states`: its momentum, then its fp32 master where it has one."""
        momentum, *master = states
        return Matrix(name, self.decay_of(name), work, master[0] if master else work, momentum, gradient)

    def update(
        self,
        targets: Sequence[Matrix],
        *,
        learning_rate: float,
        count: Tensor,
        coefficient: Tensor | None,
        constants: object = None,
    ) -> None:
        """One step on the matrices `targets`, one after another. `count` and `constants` are not used."""
        for matrix in targets:
            update(
                matrix, learning_rate=learning_rate, momentum=self.momentum, adjust=self.adjust, coefficient=coefficient
            )

    def of_pytorch(self, parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """`torch.optim.Muon` with these settings. `parameters`: its param_groups."""
        import torch

        return torch.optim.Muon(parameters, momentum=self.momentum, adjust_lr_fn=self.adjust)


# ---- in tensors


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A matrix to update, with everything the update reads, on one device. All are [rows, columns] and contiguous.

    `master` (fp32) is what the optimizer works on, `work` the copy that computes: `master` itself where it is as wide.
    """

    name: str
    weight_decay: float
    work: Tensor
    master: Tensor
    momentum: Tensor
    gradient: Tensor


def update(
    matrix: Matrix, *, learning_rate: float, momentum: float, adjust: str = MATCH_RMS, coefficient: Tensor | None = None
) -> None:
    """One step. `adjust`: torch's `adjust_lr_fn`; `coefficient`: what the gradient is multiplied by first. An fp32
    gradient is overwritten."""
    import torch

    shape, master = matrix.gradient.shape, matrix.master
    side, elements = min(shape), shape.numel()
    narrow = matrix.gradient.dtype != torch.float32
    sizes = scratch_parts(side, elements, narrow=narrow)
    scratch = torch.split(torch.empty(sum(sizes), dtype=torch.uint8, device=master.device), list(sizes))
    wide = _view(scratch[0], torch.float32, shape).copy_(matrix.gradient) if narrow else matrix.gradient
    if coefficient is not None:
        wide.mul_(coefficient)
    matrix.momentum.lerp_(wide, 1 - momentum)
    wide.lerp_(matrix.momentum, momentum)  # Nesterov's
    tall = shape[0] > shape[1]
    flat = shape[::-1] if tall else shape
    orthogonal = _orthogonal(_view(scratch[1], torch.bfloat16, shape).copy_(wide), wide, scratch[2:])
    step = wide.view(flat).copy_(orthogonal)  # as wide as the master, with the strides of PyTorch's
    master.mul_(1 - learning_rate * matrix.weight_decay)
    master.add_(step.T if tall else step, alpha=-learning_rate * _ratio(shape, adjust))
    if matrix.work is not master:
        matrix.work.copy_(master)


def _ratio(shape: torch.Size, adjust: str) -> float:
    rows, columns = shape
    return 0.2 * math.sqrt(max(shape)) if adjust == MATCH_RMS else math.sqrt(max(1, rows / columns))


def _orthogonal(matrix: Tensor, spare: Tensor, scratch: tuple[Tensor, ...]) -> Tensor:
    """The result of the Newton-Schulz iteration on a bf16 matrix, in the matrix' memory, as [shorter, longer]. `spare`:
    other memory, larger than the matrix."""
    import torch

    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    square = torch.Size([x.shape[0], x.shape[0]])
    gram, factor = (_view(part, torch.bfloat16, square) for part in scratch[:2])
    norm = _view(scratch[2], torch.bfloat16, torch.Size([]))
    x.div_(torch.linalg.vector_norm(x, out=norm).clamp_(min=EPS))
    home, other = (_view(memory.view(-1).view(torch.uint8), torch.bfloat16, x.shape) for memory in (matrix, spare))
    for _ in range(STEPS):
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=factor)
        x = torch.addmm(x, factor, x, beta=a, out=other)
        home, other = other, home
    return x if home.data_ptr() == matrix.data_ptr() else other.copy_(x)


def _view(memory: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """The first bytes of `memory` as a tensor."""
    return memory.view(dtype)[: shape.numel()].view(shape)
