"""How one tensor is trained: what its optimizer keeps for it, and what an update takes. Light: torch is imported late.

A kind of optimizer is one class in a file of its own in this folder, and a line in `planner.optimizers.table`. Chains,
plans, the engine and checkpoints read the attributes of its instances and never ask of which kind they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from planner.machine.hardware import Hardware

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_O = TypeVar("_O", bound="Optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Parameters updated per second, on the device and on the CPU."""

    gpu: float
    cpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The optimizer of one tensor. The tensor's states are its moments, followed by an fp32 master where the weight is
    narrower than fp32. Each class says what its moments are.

    kind       its name in files
    moments    the names of its moments in checkpoints, in order
    states     what the states are called in messages
    on_disk    whether states may be on a drive, and be updated piece by piece
    packs      whether a bf16 weight and its master may share bytes (`planner.cpu.packed`)
    ahead      whether the CPU may update before the gradients' norm is known, and repeat the update if the norm clips
    together   whether the device updates several tensors in one call
    rounds     whether it rounds moments after each update, which PyTorch's own optimizer does not
    own_seconds  whether `gpu_s` and `cpu_s` say how long an update takes, instead of its elements and `rates`
    own_rates  whether its `rates` differ from AdamW's, and are measured where a job asks for the kind
    resident_bytes  device memory that all tensors of the kind need together, all the time
    host_scratch  what `host_scratch_bytes` are called in receipts
    keys       the keys of a job that only this kind reads
    log        what a run's log says of it; a format for its share of the trained parameters in percent
    one_rate   whether all parameters of a job have the same learning rate
    """

    kind: ClassVar[str]
    moments: ClassVar[tuple[str, ...]]
    states: ClassVar[str]
    on_disk: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    ahead: ClassVar[bool] = False
    together: ClassVar[bool] = True
    rounds: ClassVar[bool] = False
    own_seconds: ClassVar[bool] = False
    own_rates: ClassVar[bool] = False
    resident_bytes: ClassVar[int] = 0
    host_scratch: ClassVar[str] = ""
    keys: ClassVar[tuple[str, ...]] = ()
    one_rate: ClassVar[bool] = False
    log: ClassVar[str] = ""

    @property
    def gpu_s(self) -> float:
        """Seconds of an update on the device; 0: the time that its elements take at `rates`."""
        return 0.0

    @property
    def cpu_s(self) -> float:
        """Seconds of an update on the CPU; 0: the time that its elements take at `rates`."""
        return 0.0

    def timed(self, *, gpu_s: float, cpu_s: float) -> Self:
        """The same optimizer with these seconds, if the kind has seconds of its own."""
        return self

    def estimated(self, elements: int, hardware: Hardware) -> Self:
        """The same optimizer with estimated seconds for a tensor of so many elements."""
        return self

    def trial(self, elements: int, device: torch.device) -> tuple[Callable[[], None], float]:
        """A function that does one update on random data, to be timed, and the number by which its seconds are
        multiplied for a tensor of so many elements. Only kinds of optimizer whose time per element is not AdamW's have
        one."""
        raise NotImplementedError

    def moment_bytes(self, elements: int) -> tuple[int, ...]:
        """Bytes of each moment of a tensor of so many elements."""
        raise NotImplementedError

    def scratch_bytes(self, elements: int, *, narrow: bool) -> int:
        """Bytes that an update on the device needs beside weight, gradient and states. `narrow`: the gradient is
        narrower than fp32."""
        raise NotImplementedError

    def host_scratch_bytes(self, elements: int, *, narrow: bool) -> int:
        """Bytes that an update on the CPU needs in addition; 0 for what is done in a cache."""
        return 0

    def rates(self, hardware: Hardware) -> Rates:
        """How fast this machine updates tensors of the kind."""
        return Rates(gpu=hardware.gpu_update_parameters_per_s, cpu=hardware.cpu_update_parameters_per_s)

    def with_rates(self, hardware: Hardware, rates: Rates) -> Hardware:
        """The machine with these as measured `rates`."""
        return hardware

    @classmethod
    def notes(cls, values: Mapping[str, Any]) -> Iterator[str]:
        """Notes for the person who submits a job that names this kind. `values`: the job's, by key."""
        yield from ()

    @classmethod
    def groups(cls, settings: Group, model: nn.Module, values: Mapping[str, Any]) -> tuple[Group, ...]:
        """The parameter groups of a job that trains `model`. `settings`: AdamW's, for all parameters; `values`: the
        job's, of `keys`."""
        return (settings,)

    @classmethod
    def chosen(cls, model: nn.Module) -> Mapping[str, Any]:
        """Parameter name -> its optimizer, for the parameters of `model` that a job of this kind does not leave to
        AdamW."""
        return {}

    def moment_layouts(self, weight: Tensor) -> list[tuple[torch.dtype, torch.Size]]:
        """Dtype and shape of each moment of `weight`."""
        import torch

        return [(torch.float32, weight.shape)] * len(self.moments)

    def named(self, moments: Sequence[Tensor], shape: torch.Size) -> dict[str, Tensor]:
        """Name -> moment, as checkpoints store those of a tensor of this shape; the moments are views."""
        return dict(zip(self.moments, moments, strict=True))

    def in_fp32(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """States by name, as `named` gives them, in fp32."""
        return dict(parts)

    def from_fp32(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """States by name in the form of `named`, from those that `in_fp32` gives."""
        return dict(parts)

    def round_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Round fp32 moments in place, as an update of this kind does."""

    def constants(self, place: Callable[[Tensor], Tensor]) -> object:
        """What updates on a device read beside their tensors; `place` puts a tensor on that device."""
        return None


def shares(optimizers: Mapping[Any, int], parameters: int) -> list[str]:
    """What a run's log says of `optimizers`: optimizer -> how many of the trained `parameters` it updates."""
    counts = dict[str, int]()
    for optimizer, count in optimizers.items():
        counts[optimizer.log] = counts.get(optimizer.log, 0) + count
    return [log.format(100 * count / parameters) for log, count in counts.items() if log]


def untimed(optimizer: _O) -> _O:
    """The same optimizer without seconds."""
    return optimizer.timed(gpu_s=0.0, cpu_s=0.0)


class Target(Protocol):
    """A tensor to update, with everything that the update reads, on one device.

    `master` is what the optimizer works on, `work` the copy that computes: `master` itself where it is as wide.
    """

    @property
    def name(self) -> str:
        """The parameter's name."""

    @property
    def work(self) -> Tensor:
        """The copy that computes."""

    @property
    def master(self) -> Tensor:
        """What the optimizer works on."""


class NotUsable(Exception):
    """A setting that no update here supports. `number`: what it is. `hint`: what to do."""

    def __init__(self, number: str, hint: str) -> None:
        super().__init__(number)
        self.number, self.hint = number, hint


def check_not_negative(settings: Mapping[str, Any], *keys: str) -> None:
    """Raises NotUsable where one of the settings is below 0 or not a number."""
    for key in keys:
        if not float(settings[key]) >= 0:
            raise NotUsable(f"its {key} is {float(settings[key])}", "it must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Settings of a parameter group. Parameters in `decay_names` decay by `weight_decay`, others do not. `names`: the
    parameters of the group, if there are several groups; None: all.

    trains     the kinds of optimizers whose tensors such a group updates
    pytorch    the class of `torch.optim` that has such groups
    """

    trains: ClassVar[type[Optimizer]]
    pytorch: ClassVar[str]

    weight_decay: float
    decay_names: frozenset[str]
    names: frozenset[str] | None = None

    def has(self, name: str) -> bool:
        """Whether a parameter is in the group."""
        return self.names is None or name in self.names

    def decay_of(self, name: str) -> float:
        """The weight decay of one parameter."""
        return self.weight_decay if name in self.decay_names else 0.0

    @classmethod
    def from_pytorch(cls, settings: Mapping[str, Any], names: frozenset[str]) -> Self:
        """The group of these `names` with the settings of one of PyTorch's param_groups. Raises NotUsable."""
        raise NotImplementedError

    def optimizer_of(self, weight: Tensor) -> Optimizer:
        """The optimizer of a parameter in this group."""
        raise NotImplementedError

    def target(self, name: str, work: Tensor, states: Sequence[Tensor], gradient: Tensor) -> Target:
        """A parameter to update. `states`: its moments, then its master where it has one."""
        raise NotImplementedError

    def update(
        self,
        targets: Sequence[Any],
        *,
        learning_rate: float,
        count: Tensor,
        coefficient: Tensor | None,
        constants: object = None,
    ) -> None:
        """One step on `targets`, all on one device. `count`: the step's number. `coefficient`: the factor for the
        gradients, None without clipping. Both are float32 without dimensions, on the same device. `constants`: what
        `Optimizer.constants` gave for that device."""
        raise NotImplementedError

    def of_pytorch(self, parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """PyTorch's own optimizer with these settings. `parameters`: its param_groups."""
        raise NotImplementedError
