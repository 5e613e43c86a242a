"""`torch.cuda` and the rest of PyTorch's Python, as they are where there is a CUDA device."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._device import _device_constructors

from planner.cpu.meter import Meter
from planner.graph import fake
from tests.support.cuda import build, copies, kernels, tensors
from tests.support.cuda.device import CUDA, Device
from tests.support.cuda.plugged import OUT_OF_MEMORY, Plugged, words_of
from tests.support.cuda.streams import Event, Stream
from tests.support.cuda.tensors import CPU_GENERATOR, DeviceTensor, fake_of, new, plain_of, put

_library: torch.library.Library | None = None
PROPERTIES = SimpleNamespace(
    name="Emulated",
    major=8,
    minor=6,
    multi_processor_count=16,
    warp_size=32,
    gcnArchName="",
    max_threads_per_multi_processor=1536,
    regs_per_multiprocessor=65536,
)


def install() -> Device:
    """Have a device in this process from now on, and give it. It cannot be taken out again."""
    assert _library is None
    guard = build.load()
    guard.put_device_there()
    device = tensors.device = Device(guard)
    assert copies.SPECIAL and kernels.SPECIAL  # they tell tensors.py of what they have
    _install_factories()
    _install_tensor_methods(device)
    _install_generator(device)
    _install_module(device)
    _install_allocators(device, guard)
    fake.FAKE_TYPES = (*fake.FAKE_TYPES, DeviceTensor)  # real tensors beside fake ones count, as on a real device
    Meter.__init__.__defaults__ = ("cpu", (torch.Tensor, torch.nn.Parameter, DeviceTensor, _DeviceParameter))
    torch._C._set_multithreading_enabled(False)  # autograd has no thread for this device
    return device


def _install_factories() -> None:
    """Operations that make a tensor from nothing."""
    global _library
    _library = library = torch.library.Library("aten", "IMPL", "CUDA")

    def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
        shape = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
        return new(shape.size(), shape.stride(), shape.dtype)

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return new(size, stride, dtype or torch.get_default_dtype())

    def from_host(overload: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A kernel that writes what its arguments say."""
        return lambda *args, dtype=None, **_: put(overload(*args, dtype=dtype, device="cpu"))

    library.impl("empty.memory_format", empty)
    library.impl("empty_strided", empty_strided)
    library.impl("_fused_sdp_choice", lambda *args, **kwargs: int(torch.nn.attention.SDPBackend.MATH.value))
    for name in (
        "arange",
        "arange.start",
        "arange.start_step",
        "eye",
        "eye.m",
        "linspace",
        "tril_indices",
        "triu_indices",
    ):
        base, _, variant = name.partition(".")
        library.impl(name, from_host(getattr(getattr(torch.ops.aten, base), variant or "default")))


def _install_tensor_methods(device: Device) -> None:
    _device_constructors()  # a set, made once: `with torch.device(…)` is for PyTorch's own torch.tensor, called below
    own_tensor, own_empty, own_from_tensor = torch.tensor, torch.empty, FakeTensorMode.from_tensor
    data = torch._C.TensorBase.data

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        made = own_tensor(data, **kwargs)
        return made if device is None or torch.device(device).type != "cuda" else made.to(CUDA)

    def pinned(nbytes: int) -> Tensor:
        buffer, new = device.host.pinned(max(1, nbytes), most=device.host_bytes)
        if new:
            device.host_waits("cudaHostAlloc", False)
        return buffer[:nbytes]

    def pin_memory(tensor: Tensor, device_: Any = None) -> Tensor:
        return pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def empty(*size: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        if not pin_memory:
            return own_empty(*size, **kwargs)
        like = own_empty(*size, **kwargs, device="meta")
        return pinned(like.nbytes).view(like.dtype).view(like.shape)

    def is_pinned(tensor: Tensor, device_: Any = None) -> bool:
        return tensor.is_cpu and device.host.reaches(tensor.data_ptr(), tensor.nbytes)

    def from_tensor(mode: FakeTensorMode, tensor: Tensor, **kwargs: Any) -> Any:
        if isinstance(tensor, DeviceTensor):
            return fake_of(mode, tensor).requires_grad_(tensor.requires_grad)
        return own_from_tensor(mode, tensor, **kwargs)

    def set_data(parameter: torch.nn.Parameter, value: Tensor) -> None:
        """Between host and device PyTorch's own setter sees two classes."""
        if not isinstance(value, DeviceTensor) and not isinstance(parameter, DeviceTensor):
            data.__set__(parameter, value)  # type: ignore[attr-defined]
            return
        kind = _DeviceParameter if isinstance(value, DeviceTensor) else torch.nn.Parameter
        other, mine = kind(value.detach(), parameter.requires_grad), dict(parameter.__dict__)
        torch.utils.swap_tensors(parameter, other)
        parameter.__dict__.update(mine)

    torch.tensor, torch.empty = tensor, empty  # type: ignore[assignment]
    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment, method-assign]
    torch.Tensor.is_pinned = is_pinned  # type: ignore[assignment, method-assign]
    torch.nn.Parameter.data = property(data.__get__, set_data)  # type: ignore[assignment, attr-defined]
    FakeTensorMode.from_tensor = from_tensor  # type: ignore[method-assign]


class _DeviceParameter(DeviceTensor, torch.nn.Parameter):
    @staticmethod
    def __new__(cls, value: Tensor, requires_grad: bool) -> _DeviceParameter:
        return torch.Tensor._make_subclass(  # type: ignore[return-value]
            cls, plain_of(value), requires_grad, dispatch_device=True, device_for_backend_keys=CUDA
        )


def _install_generator(device: Device) -> None:
    def state_of(seed: int, offset: int) -> Tensor:
        return torch.tensor([seed, offset], dtype=torch.int64).view(torch.uint8)

    class Generator:
        """A device's generator has a seed and an offset, both on the host."""

        device, seed = CUDA, 0

        def manual_seed(self, seed: int) -> Generator:
            self.seed = seed
            return self

        def get_state(self) -> Tensor:
            return state_of(self.seed, 0)

    class AnyGenerator(type):
        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, CPU_GENERATOR | Generator)

    class MadeGenerator(metaclass=AnyGenerator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return Generator() if torch.device(device).type == "cuda" else CPU_GENERATOR(device)

    def set_state(state: Tensor, _: Any = None) -> None:
        device.seed, device.offset = state.view(torch.int64).tolist()

    def manual_seed(seed: int) -> None:
        device.seed, device.offset = int(seed), 0

    torch.Generator = MadeGenerator  # type: ignore[assignment, misc]
    torch.cuda.get_rng_state = lambda _=None: state_of(device.seed, device.offset)
    torch.cuda.set_rng_state = set_state
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = manual_seed


def _install_module(device: Device) -> None:
    queues, allocator = device.queues, device.allocator

    class Streams(type):
        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, Stream)

    class MadeStream(metaclass=Streams):
        def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
            return queues.new_stream()

    class MadeEvent(Event):
        def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
            super().__init__(queues)

    class Runtime:
        """torch.cuda.cudart()"""

        @staticmethod
        def cudaHostRegister(address: int, size: int, flags: int) -> int:
            device.host_waits("cudaHostRegister", False)
            if device.host.bytes + size > device.host_bytes:
                return device.driver.failed(OUT_OF_MEMORY)
            device.host.register(address, size)
            return 0

        @staticmethod
        def cudaHostUnregister(address: int) -> int:
            device.host_waits("cudaHostUnregister", False)
            device.host.unregister(address)
            return 0

    def check_error(code: int) -> None:
        if code:
            error = torch.cuda.CudaError.__new__(torch.cuda.CudaError)  # its own __init__ asks CUDA for the words
            error.args = (f"{words_of(code)} ({code})",)
            raise error

    def own_allocator() -> None:
        device.reap()
        if device.plugged is not None:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    def reaped(found: Callable[[], int]) -> Callable[..., int]:
        def ask(_: Any = None) -> int:
            own_allocator()
            return found()

        return ask

    def reset_peaks(_: Any = None) -> None:
        own_allocator()
        allocator.reset_peaks()

    def empty_cache() -> None:
        device.reap()
        with queues.lock:
            allocator.release()
            if device.plugged is not None:
                device.plugged.empty()

    @contextlib.contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        with queues.on(stream):
            yield

    def set_fraction(fraction: float, _: Any = None) -> None:
        own_allocator()
        device.fraction = fraction
        allocator.cap_bytes = int(fraction * device.total_bytes)

    def record(enabled: str | None = "all", **_: Any) -> None:
        own_allocator()
        allocator.history = [] if enabled else None

    def snapshot(_: Any = None) -> dict[str, Any]:
        own_allocator()
        return {"device_traces": [[*(allocator.history or ())]]}

    torch.cuda.memory._record_memory_history, torch.cuda.memory._snapshot = record, snapshot
    for name, value in {
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_available": lambda: True,
        "is_initialized": lambda: device.initialized,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_properties": lambda _=None: SimpleNamespace(**vars(PROPERTIES), total_memory=device.total_bytes),
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "Stream": MadeStream,
        "Event": MadeEvent,
        "stream": on,
        "default_stream": lambda device=None: queues.default,
        "current_stream": lambda device=None: queues.current,
        "set_stream": queues.set_current,
        "synchronize": lambda _=None: device.synchronize(),
        "cudart": lambda: Runtime,
        "check_error": check_error,
        "set_sync_debug_mode": lambda mode: setattr(device, "sync_debug", mode),
        "mem_get_info": lambda _=None: (device.free_bytes, device.total_bytes),
        "memory_allocated": reaped(lambda: allocator.allocated.now),
        "memory_reserved": reaped(lambda: allocator.reserved.now),
        "max_memory_allocated": reaped(lambda: allocator.allocated.peak),
        "max_memory_reserved": reaped(lambda: allocator.reserved.peak),
        "reset_peak_memory_stats": reset_peaks,
        "empty_cache": empty_cache,
        "get_per_process_memory_fraction": lambda _=None: device.fraction,
        "set_per_process_memory_fraction": set_fraction,
    }.items():
        setattr(torch.cuda, name, value)


def _install_allocators(device: Device, guard: ctypes.CDLL) -> None:
    def change(allocator: Plugged) -> None:
        if device.initialized:
            raise RuntimeError("Can't swap an already initialized allocator")
        device.plugged, device.initialized = allocator, True

    for name, value in {
        "_cuda_customAllocator": lambda allocate, free: Plugged(guard, allocate, free),
        "_cuda_changeCurrentAllocator": change,
        "_cuda_clearCublasWorkspaces": device.workspaces.clear,
        "_cuda_getCurrentRawStream": lambda _: 0,  # bitsandbytes looks for it when it is imported; peft imports that
    }.items():
        setattr(torch._C, name, value)
