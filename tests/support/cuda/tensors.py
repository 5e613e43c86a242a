"""Tensors that say `cuda:0`, and what becomes of an operation on them: memory now, numbers later.

A tensor's storage is a piece of the device's memory, so PyTorch frees it when it frees a real one. An operation makes
its results' memory when it is called, by its meta kernel, and queues the CPU's kernel, which finds its operands by
their addresses when it runs, whatever is there by then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from planner.cpu.in_place_sums import adds_in_place
from tests.support.cuda.device import CUDA, Device, Layout
from tests.support.cuda.streams import Stream
from tests.support.cuda.workspaces import PRODUCTS

aten = torch.ops.aten
VIEWS = {aten._unsafe_view.default, aten.lift_fresh.default, aten._reshape_alias.default, aten.lift.default}
"""Beside those whose schema says so."""
SIZED_BY_NUMBERS = {
    "aten::bincount",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
"""The host must know the numbers to know the size of the result."""
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
RANDOM = {
    "aten::bernoulli",
    "aten::bernoulli_",
    "aten::exponential_",
    "aten::multinomial",
    "aten::native_dropout",
    "aten::normal_",
    "aten::rand_like",
    "aten::randint_like",
    "aten::randn_like",
    "aten::random_",
    "aten::uniform_",
}
WIDE = {
    "aten::native_layer_norm",
    "aten::native_layer_norm_backward",
    "aten::native_group_norm",
    "aten::native_group_norm_backward",
    "aten::_fused_rms_norm",
    "aten::_fused_rms_norm_backward",
}
"""They keep means and deviations in fp32 where numbers are narrower, and compute in it; the CPU's kernels do not."""
SPECIAL: dict[OpOverload, Callable[..., Any]] = {}
"""Those that copies.py has."""
SCRATCH: Callable[[Any, Sequence[Any]], tuple[Sequence[int], Sequence[int]]] = lambda func, args: ([], [])  # noqa: E731
"""kernels.py's."""
CPU_GENERATOR = torch.Generator

device: Device = None  # type: ignore[assignment]
"""The one that `install` has made."""


class DeviceTensor(torch.Tensor):
    """A tensor of the device."""

    @staticmethod
    def __new__(cls, plain: Tensor) -> DeviceTensor:
        return torch.Tensor._make_subclass(  # type: ignore[return-value]
            cls, plain, False, dispatch_device=True, device_for_backend_keys=CUDA
        )

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):  # code that is traced looks at a real tensor
            mode = next(v.fake_mode for v in _leaves((args, kwargs)) if isinstance(v, FakeTensor))
            args, kwargs = _map((args, kwargs), lambda t: fake_of(mode, t) if isinstance(t, DeviceTensor) else t)
            return func(*args, **kwargs)
        if adds_in_place(func, args, kwargs):  # a card's own tensors are no subclass
            func = aten.add_.Tensor
        return _way_of(func)(func, args, kwargs)

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        device.record_stream(self, stream)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


def new(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> DeviceTensor:
    """A tensor in new memory."""
    if 0 in size:
        return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype))
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return DeviceTensor(device.storage(span * dtype.itemsize).view(dtype).as_strided(size, stride))


def plain_of(tensor: Tensor) -> Tensor:
    """A plain tensor over the same storage."""
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def fake_of(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake of a tensor of the device, in a storage as large."""
    with mode:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        base = torch.empty(count, dtype=tensor.dtype, device=CUDA)
        return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def meta_of(tensor: Tensor) -> Tensor:
    """Its shape alone."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def issue(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor] | None
) -> None:
    """Queue `func`, which has its results elsewhere (None: it works in place)."""
    if isinstance(func, OpOverload) and func._schema.name in PRODUCTS:
        device.workspaces.use(device.queues.current.number)

    def held(value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            return Layout.of(value)
        if isinstance(value, Tensor):
            if value.dim():
                raise RuntimeError(f"{func}: expected all tensors on cuda:0, one of {tuple(value.shape)} is on the CPU")
            return value.detach().clone()
        return torch.device("cpu") if isinstance(value, torch.device) else value

    operands, names = _map(args, held), _map(kwargs, held)
    targets = None if results is None else [Layout.of(result) for result in results]

    def run() -> None:
        found, named = _map(operands, there), _map(names, there)
        try:
            made = func(*found, **named)
        except Exception as error:
            error.add_note(f"{func} of {operands} {names}")
            raise
        if targets is not None:
            for target, value in zip(targets, _tensors(made), strict=True):
                device.at(target).copy_(value)

    device.give(run)
    device.launched()


def there(value: Any) -> Any:
    """What queued work finds for a layout."""
    return device.at(value) if isinstance(value, Layout) else value


def put(value: Tensor) -> DeviceTensor:
    """A host tensor's numbers in new memory, as a kernel's arguments take them there: without a copy."""
    made = new(value.size(), value.stride(), value.dtype)
    layout, value = Layout.of(made), value.detach().clone()
    device.give(lambda: device.at(layout).copy_(value))
    device.launched()
    return made


# ---- the ways an operation can go


@functools.cache
def _way_of(func: OpOverload) -> Callable[[OpOverload, Sequence[Any], Mapping[str, Any]], Any]:
    name = func._schema.name
    if func in SPECIAL:
        return lambda _, args, kwargs: SPECIAL[func](*args, **kwargs)
    if func is torch.ops.prim.device.default:
        return lambda *_: CUDA
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return _take_apart
    if name in SIZED_BY_NUMBERS or not all("Tensor" in str(result.type) for result in func._schema.returns):
        return _read
    if func.is_view or func in VIEWS:
        return _view
    if name in INDEXED:
        return _index
    if name in RANDOM:
        return _draw
    return _change if func._schema.is_mutable else _make


def _take_apart(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Where autograd's keys are off nobody has done it."""
    made = func.decompose(*args, **kwargs)
    return _make(func, args, kwargs) if made is NotImplemented else made


def _view(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    found, named = _map((args, kwargs), lambda v: plain_of(v) if isinstance(v, DeviceTensor) else v)
    return _map(func(*found, **named), lambda v: DeviceTensor(v) if isinstance(v, Tensor) else v)


def _make(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], kernel: Callable[..., Any] | None = None
) -> Any:
    if func._schema.name in WIDE:
        kernel = _widely(func)
    shapes = _shapes(func, args, kwargs)
    before, after = SCRATCH(func, args) if device.scratch else ([], [])
    inner = [device.storage(size) for size in before]
    made = _map(shapes, lambda v: new(v.size, v.stride, v.dtype) if isinstance(v, Layout) else v)
    inner += [device.storage(size) for size in after]
    issue(kernel or func, args, kwargs, _tensors(made))
    if inner:
        inner.clear()
        device.reap()
    return made


def _widely(func: OpOverload) -> Callable[..., Any]:
    return lambda *args, **kwargs: func(
        *_map(args, lambda v: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v), **kwargs
    )


def _change(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], kernel: Callable[..., Any] | None = None
) -> Any:
    inner = [device.storage(size) for size in SCRATCH(func, args)[0]] if device.scratch else []
    issue(kernel or func, args, kwargs, None)
    if inner:
        inner.clear()
        device.reap()
    schema = func._schema
    given = {a.name: args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(schema.arguments)}
    written = {frozenset(a.alias_info.before_set): given[a.name] for a in schema.arguments if a.alias_info is not None}
    results = [written[frozenset(r.alias_info.before_set)] for r in schema.returns]
    return results[0] if len(results) == 1 else tuple(results) or None


def _read(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    device.synchronize_current(func.name())
    if device.dry:
        raise RuntimeError(f"{func} asks for numbers, and nothing is computed")
    found, named = _map((args, kwargs), lambda v: device.at(Layout.of(v)) if isinstance(v, DeviceTensor) else v)
    with torch.no_grad():
        return _map(func(*found, **named), lambda v: put(v) if isinstance(v, Tensor) else v)


def _index(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Masks are turned into numbers, which the host must count; numbers that are on the host go over first."""
    target, indices, *rest = args

    indices = [i if i is None or isinstance(i, DeviceTensor) else i.to(CUDA) for i in indices]
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        if not func._schema.is_mutable:
            return _read(func, (target, indices, *rest), kwargs)
        device.synchronize_current(func.name())
    way = _change if func._schema.is_mutable else _make
    return way(func, (target, indices, *rest), kwargs)


def _draw(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The generator's state is the host's, and is taken when the operation is called."""
    state = device.draw(args[0].numel())

    def generator() -> torch.Generator:
        return CPU_GENERATOR("cpu").manual_seed(state)

    def dropout(x: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
        if not train or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = torch.rand(x.shape, generator=generator()) < 1 - p
        return (x * mask * (1.0 / (1.0 - p))).to(x.dtype), mask

    def drawn(*a: Any, **k: Any) -> Any:
        return func(*a, **k, generator=generator())

    kernel = dropout if func is aten.native_dropout.default else drawn
    kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
    return (_change if func._schema.is_mutable else _make)(func, args, kwargs, kernel)


# ---- arguments


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.size(), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(one)) for key, one in value.items())
    return type(value), value


_KNOWN: dict[Any, Any] = {}


def _shapes(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `func` returns, each tensor as a layout at address 0."""
    key = func, _frozen(args), _frozen(kwargs)
    if key not in _KNOWN:
        _KNOWN[key] = _find_shapes(func, args, kwargs)
    return _KNOWN[key]


def _find_shapes(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    def shape(value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            return meta_of(value)
        return torch.device("meta") if isinstance(value, torch.device) else value

    found, named = _map((args, kwargs), shape)
    made = func(*found, **named)
    return _map(made, lambda v: Layout(0, v.dtype, v.size(), v.stride()) if isinstance(v, Tensor) else v)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest of lists, tuples and dicts, each leaf changed."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_map(one, change) for one in value])
    if kind is dict:
        return {key: _map(one, change) for key, one in value.items()}
    if isinstance(value, tuple) and kind is not Layout:  # of named results
        return kind([_map(one, change) for one in value])
    return change(value)


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    _map(value, found.append)
    return found


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]
