"""AdamW with its moments in 8 bits (`planner.cpu.rounded`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from planner.cpu.eight_bits import LEAST_ELEMENTS, NUMBERS_BYTES, moment_bytes, scratch_bytes
from planner.machine.hardware import Hardware
from planner.optimizers.adamw import AdamW
from planner.optimizers.base import Rates

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_GPU_SHARE = 0.2
"""Share of the rate of an update with fp32 moments: on a device, an update in 8 bits passes over memory more often, by
the inverse of this factor."""
_CPU_SHARE = 0.5
"""The same share on the CPU, where memory has half as much to do, and a core four times as much."""
_SCALES = "_scales"
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW8bit(AdamW):
    """AdamW whose moments are rounded to 8 bits after each update. The next update expands them again."""

    kind: ClassVar[str] = "adamw_8bit"
    states: ClassVar[str] = "states in 8 bits"
    on_disk: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    together: ClassVar[bool] = False
    rounds: ClassVar[bool] = True
    own_rates: ClassVar[bool] = True
    log: ClassVar[str] = "AdamW's moments of {:.1f}% of the trained parameters are rounded to 8 bits in blocks of 256"
    resident_bytes: ClassVar[int] = NUMBERS_BYTES

    def moment_bytes(self, elements: int) -> tuple[int, ...]:
        """Two moments, each with a byte for each element and a scale for each block."""
        return moment_bytes(elements), moment_bytes(elements)

    def scratch_bytes(self, elements: int, *, narrow: bool) -> int:
        """The memory into which a chunk is expanded."""
        return scratch_bytes(elements)

    def rates(self, hardware: Hardware) -> Rates:
        """The measured rates, or, where there are none, shares of AdamW's."""
        gpu, cpu = hardware.gpu_update_parameters_per_s, hardware.cpu_update_parameters_per_s
        return Rates(
            gpu=hardware.gpu_rounded_update_parameters_per_s or _GPU_SHARE * gpu,
            cpu=hardware.cpu_rounded_update_parameters_per_s or _CPU_SHARE * cpu,
        )

    def with_rates(self, hardware: Hardware, rates: Rates) -> Hardware:
        """`hardware` with these as the measured rates of updates in 8 bits."""
        return replace(
            hardware, gpu_rounded_update_parameters_per_s=rates.gpu, cpu_rounded_update_parameters_per_s=rates.cpu
        )

    @classmethod
    def notes(cls, values: Mapping[str, Any]) -> Iterator[str]:
        """A note for the user that moments are rounded, and what fp32 moments would take."""
        exact = "adamw_torch has them in fp32, 6 bytes more a parameter"
        yield f"optim: adamw_8bit rounds AdamW's moments; {exact}."

    @classmethod
    def chosen(cls, model: nn.Module) -> Mapping[str, Any]:
        """All parameters except small ones, as in bitsandbytes, and embeddings, as in transformers' Trainer."""
        from torch import nn

        embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        return {
            name: cls() for name, p in model.named_parameters() if p.numel() >= LEAST_ELEMENTS and id(p) not in embedded
        }

    def moment_layouts(self, weight: Tensor) -> list[tuple[torch.dtype, torch.Size]]:
        """Each moment is one row of bytes."""
        import torch

        return [(torch.uint8, torch.Size([moment_bytes(weight.numel())]))] * 2

    def named(self, moments: Sequence[Tensor], shape: torch.Size) -> dict[str, Tensor]:
        """Each moment as its bytes, and the scales of its blocks."""
        from planner.cpu.rounded import split

        parts: dict[str, Tensor] = {}
        for part, moment in zip(self.moments, moments, strict=True):
            parts[part + _SCALES], places = split(moment, shape.numel())
            parts[part] = places.view(shape)
        return parts

    def in_fp32(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The states by name, with moments expanded to fp32."""
        from planner.cpu.rounded import expand

        wide = {part: tensor for part, tensor in parts.items() if not part.endswith(_SCALES)}
        for part, signed in _SIGNED.items():
            if (scales := parts.get(part + _SCALES)) is not None:
                wide[part] = expand(scales, wide[part].reshape(-1), signed=signed).view(wide[part].shape)
        return wide

    def from_fp32(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The states by name, with moments rounded to bytes and scales."""
        from planner.cpu.rounded import contract

        narrow = dict(parts)
        for part, signed in _SIGNED.items():
            if part in parts:
                narrow[part + _SCALES], narrow[part] = contract(parts[part], signed=signed)
        return narrow

    def round_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Round moments to 8 bits and expand them again, in place."""
        from planner.cpu.rounded import rounded

        for part, signed in _SIGNED.items():
            if part in moments:  # else no gradient has reached it yet
                moments[part].copy_(rounded(moments[part], signed=signed))

    def constants(self, place: Callable[[Tensor], Tensor]) -> object:
        """The numbers that bytes stand for."""
        from planner.cpu.rounded import both_numbers

        return both_numbers(place)
