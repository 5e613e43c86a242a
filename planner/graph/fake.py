"""Makes fake tensors: without memory, but with the shapes, strides, dtypes, devices and lifetimes of real tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.graph.true_layouts import knows, true_result

FAKE_TYPES: tuple[type, ...] = (Tensor, nn.Parameter, FakeTensor)
"""The tensor types that a meter of bytes must count if it counts fake tensors too."""


class _Mode(FakeTensorMode):
    """Torch's fake mode, with the layouts of results corrected (`planner.graph.true_layouts`)."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def usual() -> Any:
            return super(_Mode, self).dispatch(func, types, args, kwargs)  # type: ignore[no-untyped-call]

        if not knows(func):
            return usual()
        with self:
            return true_result(func, usual, args, kwargs or {})


class FakeMode:
    """Makes fake tensors (without memory). The mode is never entered: only tensors made by it, or computed from those,
    are fake."""

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self.mode = mode or _Mode(allow_non_fake_inputs=True)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> FakeMode:
        """The mode that the fake tensors among `tensors` belong to, or a new one."""
        return cls(next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None))

    def empty(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A contiguous fake tensor with the shape and dtype of `tensor`, on `device`."""
        # What torch.empty does under the mode, in a tenth of the time: large models have thousands of weights.
        return FakeTensor(self.mode, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), device)

    def block(self, size: int, device: torch.device) -> Tensor:
        """A fake uint8 tensor of `size` bytes on `device`."""
        with self.mode:
            return torch.empty(size, dtype=torch.uint8, device=device)

    def scalar(self, device: torch.device) -> Tensor:
        """A fake float32 tensor without dimensions on `device`."""
        with self.mode:
            return torch.empty((), device=device)

    def like(self, tensor: Tensor) -> Tensor:
        """A fake tensor with the layout of `tensor`, detached, with the same `requires_grad`. If `tensor` is fake
        itself, the result shares its storage."""
        fake = tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor.detach())
        return fake.detach().requires_grad_(tensor.requires_grad)

    def fresh(self, values: Sequence[Tensor], device: torch.device | None = None) -> list[Tensor]:
        """Fake tensors laid out as `values`, in new storages, on `device` (None: the devices of `values`). Tensors
        that share a storage in `values` share one in the result."""
        bases: dict[int, Tensor] = {}
        fakes = []
        for value in values:
            storage = value.untyped_storage()
            with self.mode:
                if storage._cdata not in bases:
                    bases[storage._cdata] = torch.empty(
                        storage.nbytes() // value.element_size(), dtype=value.dtype, device=device or value.device
                    )
                base = bases[storage._cdata].view(value.dtype)
                fakes.append(base.as_strided(value.shape, value.stride(), value.storage_offset()))
        return fakes


def keep_device_guard() -> None:
    """Prevent a crash of PyTorch. Call this function in a thread that stays, nearly always the main one, before others
    trace.

    Where a PyTorch built for CUDA sees no card, FakeTensorMode replaces CUDA's device guard when it is first entered,
    once for the process. But the guard belongs to that thread (`thread_local` in c10/core/impl/
    DeviceGuardImplInterface.cpp) and is freed when the thread ends, as the threads that run micro-batches do. The next
    trace then uses freed memory, and the process ends by SIGSEGV.
    """
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)  # a private name, which a later PyTorch may not have
    if ensure is not None and not torch.cuda.is_available():  # with a card it is not needed, and would initialize CUDA
        ensure()


def fake_weights(
    module: nn.Module, mode: FakeMode, device: torch.device, *, buffers: bool = True
) -> AbstractContextManager[None]:
    """A context in which all parameters of `module` (and buffers, if asked) are fake and contiguous, as they are when
    the block runs. It does not matter whether they were real, on meta, or expanded from one element."""
    return other_weights(module, lambda tensor: mode.empty(tensor, device), buffers=buffers)


@contextlib.contextmanager
def fake_model(model: nn.Module, mode: FakeMode, device: torch.device) -> Iterator[None]:
    """A context in which the model runs on fake weights and real buffers, and all that depends on weights is fake. What
    is computed from buffers and the batch alone is real, so that code that looks at it branches as in training. Only
    results of at least `_LARGE` elements are fake, too: the masks of long rows would take gigabytes. Code that looks at
    the values of these raises an error."""
    with fake_weights(model, mode, device, buffers=False), _LargeAsFake(mode.mode):
        yield


_LARGE = 1 << 26  # elements: the mask of one row of 8192 tokens


class _LargeAsFake(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which results of at least `_LARGE` elements are fake, although what they are computed from is real."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _may_be_large(func, args, kwargs):
            fakes = tree_map_only(Tensor, self.mode.from_tensor, (tuple(args), dict(kwargs)))
            with self.mode, contextlib.suppress(DataDependentOutputException, DynamicOutputShapeException):
                result = func(*fakes[0], **fakes[1])
                if any(isinstance(leaf, Tensor) and leaf.numel() >= _LARGE for leaf in tree_leaves(result)):
                    return result
        return func(*args, **kwargs)


def _may_be_large(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation on real tensors may make a new one of at least `_LARGE` elements."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or func.is_view:
        return False
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        return False
    if tensors:
        shapes = {tensor.shape for tensor in tensors}
        if torch.Tag.pointwise in func.tags and len(shapes) > 1:
            shapes = {torch.broadcast_shapes(*shapes)}  # type: ignore[no-untyped-call]
        return max(map(math.prod, shapes)) >= _LARGE
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    device = kwargs.get("device")
    return bool(sizes) and math.prod(sizes) >= _LARGE and not (device and torch.device(device).type == "meta")


@contextlib.contextmanager
def other_weights(module: nn.Module, make: Callable[[Tensor], Tensor], *, buffers: bool = False) -> Iterator[None]:
    """A context in which all parameters of `module` (and buffers, if asked) are replaced by new tensors,
    `make(tensor)`. `make` is called once for tied parameters."""
    others: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers) if buffers else (part._parameters,)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in others:
                    other = make(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    others[id(tensor)] = _parameter(other, tensor.requires_grad) if is_parameter else other
                replaced.append((table, name, tensor))
    try:
        for table, name, tensor in replaced:
            table[name] = others[id(tensor)]
        yield
    finally:
        for table, name, tensor in replaced:
            table[name] = tensor


def _parameter(tensor: Tensor, requires_grad: bool) -> Tensor:
    """`tensor` as a parameter."""
    if not isinstance(tensor, FakeTensor):
        return nn.Parameter(tensor, requires_grad)
    tensor._is_param = True  # as nn.Parameter does, which detaches the tensor first: that takes far longer
    return tensor.requires_grad_(requires_grad)


@contextlib.contextmanager
def same_buffers(module: nn.Module) -> Iterator[None]:
    """A context after which the buffers of `module` have their earlier values again, even if the code inside changes
    them (such as a buffer that counts calls)."""
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
