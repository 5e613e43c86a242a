"""Tensors without memory: shapes, strides, dtypes, devices and lifetimes are those of real ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from planner.graph.true_layouts import knows, true_result

FAKE_TYPES: tuple[type, ...] = (Tensor, nn.Parameter, FakeTensor)
"""What a meter counts that is to count fake tensors too."""


class _Mode(FakeTensorMode):
    """Knows more than torch's about how results are laid out."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def usual() -> Any:
            return super(_Mode, self).dispatch(func, types, args, kwargs)  # type: ignore[no-untyped-call]

        if not knows(func):
            return usual()
        with self:
            return true_result(func, usual, args, kwargs or {})


class FakeMode:
    """Makes fake tensors. It is never entered: only what is made here, or computed from it, is fake."""

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self.mode = mode or _Mode(allow_non_fake_inputs=True)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> FakeMode:
        """The mode that `tensors` live in, or a new one."""
        return cls(next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None))

    def empty(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A tensor of that shape and dtype on `device`, laid out contiguously."""
        with self.mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    def block(self, size: int, device: torch.device) -> Tensor:
        """`size` bytes."""
        with self.mode:
            return torch.empty(size, dtype=torch.uint8, device=device)

    def scalar(self, device: torch.device) -> Tensor:
        """A float32 tensor without dimensions."""
        with self.mode:
            return torch.empty((), device=device)

    def like(self, tensor: Tensor) -> Tensor:
        """A fake of a real tensor; a fake one itself. Detached, `requires_grad` kept."""
        fake = tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor.detach())
        return fake.detach().requires_grad_(tensor.requires_grad)

    def fresh(self, values: Sequence[Tensor], device: torch.device | None = None) -> list[Tensor]:
        """Tensors laid out as `values`, in new storages, on `device` or where they are; those that share one in
        `values` share one here."""
        bases: dict[int, Tensor] = {}
        made = []
        for value in values:
            storage = value.untyped_storage()
            with self.mode:
                if storage._cdata not in bases:
                    bases[storage._cdata] = torch.empty(
                        storage.nbytes() // value.element_size(), dtype=value.dtype, device=device or value.device
                    )
                base = bases[storage._cdata].view(value.dtype)
                made.append(base.as_strided(value.shape, value.stride(), value.storage_offset()))
        return made


def keep_device_guard() -> None:
    """Called by a thread that stays, before others trace: as good as always the main one.

    Where a PyTorch built for CUDA sees no card, FakeTensorMode puts a guard in the place of CUDA's when it is first
    entered, once for the process. But the guard is the thread's own (`thread_local` in c10/core/impl/
    DeviceGuardImplInterface.cpp) and goes when that thread ends, as a slice's does with its engine; whoever traces next
    uses memory that was freed, and the process ends by SIGSEGV.
    """
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)  # a private name, which a later PyTorch may not have
    if ensure is not None and not torch.cuda.is_available():  # with a card nobody needs it, and it would begin CUDA
        ensure()


def fake_weights(
    module: nn.Module, mode: FakeMode, device: torch.device, *, buffers: bool = True
) -> AbstractContextManager[None]:
    """Inside, all parameters of `module` (and buffers, if asked) are fake. Whether they were real, on meta, or
    one-element expands does not matter: weights are contiguous when the block runs."""
    return other_weights(module, lambda tensor: mode.empty(tensor, device), buffers=buffers)


@contextlib.contextmanager
def other_weights(module: nn.Module, make: Callable[[Tensor], Tensor], *, buffers: bool = False) -> Iterator[None]:
    """Inside, all parameters of `module` (and buffers, if asked) are what `make` makes of them, tied ones once."""
    made: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers) if buffers else (part._parameters,)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    other = make(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if is_parameter else other
                replaced.append((table, name, tensor))
    try:
        for table, name, tensor in replaced:
            table[name] = made[id(tensor)]
        yield
    finally:
        for table, name, tensor in replaced:
            table[name] = tensor


@contextlib.contextmanager
def same_buffers(module: nn.Module) -> Iterator[None]:
    """Afterwards the buffers of `module` are what they were, though code inside may count its calls in one."""
    before = [
        (part._buffers, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for table, name, buffer, value in before:
                table[name] = buffer.copy_(value)
