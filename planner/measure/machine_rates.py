"""Measures a machine's rates (copies, updates, matrix products) in a few seconds, or estimates them from what the
machine says about itself.

If the device is the CPU, its "device memory" is a share of host memory, and transfers are copies within host memory.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.cpu.adamw import Step, Target, cpu_kernel
from planner.machine.hardware import Hardware
from planner.machine.this_machine import ram_bytes
from planner.machine.traffic import UPDATE_TRAFFIC_BYTES
from planner.measure.stopwatch import Stopwatch, warm_up
from planner.measure.times import device_name
from planner.optimizers.adamw import update
from planner.optimizers.base import Optimizer, Rates
from planner.optimizers.table import ADAMW

_MIB = 2**20
_COPY_BYTES, _MOST_COPY_BYTES = 64 * _MIB, 256 * _MIB
_UPDATED, _MOST_UPDATED = 4 * _MIB, 64 * _MIB  # parameters in the timed update
_UPDATED_BYTES = 16  # for each parameter: weight, gradient and moments
_CACHES = 4  # timed data are this many times larger than the last cache
_FETCHES = 50  # fetches whose issuing is timed together
_RANDOM = 2**20  # numbers drawn; a longer tensor repeats them
_CACHE_SIZES = "/sys/devices/system/cpu/cpu0/cache"
_BLOCK_OPERATIONS = 150  # what a block's forward launches, about
_REPEATS = 5
_COPY_TRAFFIC = 2  # a copy in host memory reads each byte and writes it


def measure_hardware(
    device: torch.device, dtype: torch.dtype = torch.float32, *, optimizer: Optimizer = ADAMW
) -> Hardware:
    """The machine with rates measured on `device`, in a few seconds. Each rate is measured while other copies use the
    same memory. `dtype`: what the model computes in. `optimizer`: its steps are measured, too, if it has rates of its
    own."""
    watch, on_gpu = Stopwatch(device), device.type == "cuda"
    # Where the device is the CPU, real work passes through its caches as these small copies do.
    copied, updated = (_copied_bytes(), _updated(_last_cache_bytes())) if on_gpu else (_COPY_BYTES, _UPDATED)
    with torch.no_grad():
        with _copying(copied):
            cpu_update = _cpu_update_parameters_per_s(updated, dtype)
            own_cpu = _cpu_update_parameters_per_s(updated, dtype, optimizer) if optimizer.own_rates else 0.0
        memory = _cpu_memory_bytes_per_s(copied)
        warm_up(device, dtype)
        up, down = _link_bytes_per_s(device, watch)
        on_device = _updated(_cache_bytes(device))
        own_gpu = _own_gpu_parameters_per_s(on_device, device, optimizer) if optimizer.own_rates and on_gpu else own_cpu
        gpu_update = _gpu_update_parameters_per_s(on_device, device) if on_gpu else cpu_update
        latency_s = _copy_latency_s(device, watch)
        hardware = Hardware(
            name=machine_name(device_name(device)),
            gpu_bytes=gpu_bytes(device),
            cpu_bytes=cpu_bytes(device),
            h2d_bytes_per_s=up,
            d2h_bytes_per_s=down,
            gpu_update_parameters_per_s=gpu_update,
            cpu_update_parameters_per_s=cpu_update,
            cpu_memory_bytes_per_s=memory,
            launch_s=_launch_s(device),
            operation_s=_operation_s(device),
            min_transfer_bytes=int(latency_s * max(up, down)),
            flops_per_s=_flops_per_s(device, dtype, watch),
            shared_compute=_shared_compute(device),
        )
    return optimizer.with_rates(hardware, Rates(gpu=min(own_gpu, gpu_update), cpu=min(own_cpu, cpu_update)))


def estimate_hardware(device: torch.device, dtype: torch.dtype = torch.float32) -> Hardware:
    """The machine with cautiously guessed rates, for a first plan before anything has been measured. `dtype`: what the
    model computes in."""
    memory = 20e9
    copies = 12e9 if device.type == "cuda" else memory / 4
    device_memory, flops = _device_rates(device, dtype) if device.type == "cuda" else (memory, _cpu_flops())
    return Hardware(
        name=machine_name(device_name(device)),
        gpu_bytes=gpu_bytes(device),
        cpu_bytes=cpu_bytes(device),
        h2d_bytes_per_s=copies,
        d2h_bytes_per_s=copies,
        gpu_update_parameters_per_s=device_memory / UPDATE_TRAFFIC_BYTES,
        cpu_update_parameters_per_s=memory / 2 / UPDATE_TRAFFIC_BYTES,
        cpu_memory_bytes_per_s=memory,
        launch_s=_BLOCK_OPERATIONS * 5e-6 if device.type == "cuda" else 0.0,
        min_transfer_bytes=int(20e-6 * copies),
        flops_per_s=flops,
        shared_compute=_shared_compute(device),
    )


def machine_name(device: str) -> str:
    """The machine's name: `device`, its name, with the processor and the host's memory. It is the same in every run,
    because plans and measurements are stored under it."""
    return f"{device} on {_processor()}, {ram_bytes() // 2**30} GiB"


def gpu_bytes(device: torch.device) -> int:
    """Bytes of device memory that a job may use by default: the memory that is free now, less a reserve for the
    desktop; on the CPU a quarter of host memory. Rounded down to 128 MiB, so that it does not change with every window
    that opens."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        usable = free - max(256 * _MIB, total // 50)
    else:
        usable = ram_bytes() // 4
    return max(_MIB, usable // (128 * _MIB) * 128 * _MIB)


def cpu_bytes(device: torch.device) -> int:
    """Bytes of host memory that a job may use by default: all but the system's share. If the device is the CPU, the
    memory that counts as the device's is subtracted, too."""
    ram = ram_bytes()
    usable = ram - max(2**30, ram // 10) - (0 if device.type == "cuda" else ram // 4)
    return max(_MIB, usable // _MIB * _MIB)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _link_bytes_per_s(device: torch.device, watch: Stopwatch) -> tuple[float, float]:
    """Bytes per second from host to device and from device to host, each measured while the other direction is busy."""
    host, back = (torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2))
    if device.type != "cuda":
        # Copy into newly allocated memory, as a fetch does: the first write to each page waits for the system.
        with _copying(_COPY_BYTES):
            rate = _COPY_BYTES / _median_s(watch, lambda: [torch.empty_like(w).copy_(w) for w in host.view(-1, _MIB)])
        return rate, rate
    on_device, source = (torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def both(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
        with torch.cuda.stream(other):
            for _ in range(3):
                second[0].copy_(second[1], non_blocking=True)
        first[0].copy_(first[1], non_blocking=True)

    up = _COPY_BYTES / _median_s(watch, lambda: both((on_device, host), (back, source)))
    torch.cuda.synchronize(device)
    down = _COPY_BYTES / _median_s(watch, lambda: both((back, source), (on_device, host)))
    torch.cuda.synchronize(device)
    return up, down


def _copy_latency_s(device: torch.device, watch: Stopwatch) -> float:
    """Seconds that a copy takes whatever its size: on a GPU to start; on the CPU also to pass through a queue's
    thread."""
    host = torch.ones(1, pin_memory=device.type == "cuda")
    on_device = torch.ones(1, device=device)
    copy_s = _median_s(watch, lambda: on_device.copy_(host, non_blocking=True), repeats=50)
    return copy_s if device.type == "cuda" else copy_s + 20e-6


def _updated(cache_bytes: int) -> int:
    """A number of parameters so large that a cache of this size does not speed up their update."""
    return min(max(_UPDATED, _CACHES * cache_bytes // _UPDATED_BYTES), _MOST_UPDATED)


def _copied_bytes() -> int:
    """The bytes of each of the four tensors that two threads copy during the measurement."""
    return min(max(_COPY_BYTES, _CACHES * _last_cache_bytes() // 4), _MOST_COPY_BYTES)


def _last_cache_bytes() -> int:
    """The size of this processor's largest cache; 0 where the system does not say."""
    sizes = [0]
    for path in Path(_CACHE_SIZES).glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(path.read_text("ascii").strip().removesuffix("K")) * 2**10)
    return max(sizes)


def _cache_bytes(device: torch.device) -> int:
    """The size of a GPU's last cache; 0 for other devices."""
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) if device.type == "cuda" else 0


def _random(count: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """Random numbers like those of weights. With equal numbers a device would be faster: fewer bits change."""
    drawn = torch.randn(min(count, _RANDOM), device=device).mul_(0.02).to(dtype)
    return drawn.repeat(-(-count // len(drawn)))[:count]


def _cpu_update_parameters_per_s(count: int, dtype: torch.dtype, optimizer: Optimizer = ADAMW) -> float:
    """Parameters per second that the CPU updates with the kernel used in training, with an fp32 master if weights have
    another `dtype`. `count`: how many parameters are updated for the measurement."""
    work, gradient = (_random(count, dtype) for _ in range(2))
    master = work if dtype == torch.float32 else work.float()
    exp_avg, exp_avg_sq = (torch.zeros(shape, dtype=kind) for kind, shape in optimizer.moment_layouts(work))
    target = Target("probe", 0.1, work, master, exp_avg, exp_avg_sq, gradient)
    kernel = cpu_kernel()
    return count / _median_s(Stopwatch(torch.device("cpu")), lambda: kernel.update([target], _step()))


def _own_gpu_parameters_per_s(count: int, device: torch.device, optimizer: Optimizer) -> float:
    weight, gradient = (_random(count, device=device) for _ in range(2))
    layouts = optimizer.moment_layouts(weight)
    exp_avg, exp_avg_sq = (torch.zeros(shape, dtype=kind, device=device) for kind, shape in layouts)
    target, step = Target("probe", 0.1, weight, weight, exp_avg, exp_avg_sq, gradient), _step(device)
    constants: Any = optimizer.constants(lambda tensor: tensor.to(device))
    return count / _median_s(Stopwatch(device), lambda: update([target], step, constants))


def _step(device: torch.device | None = None) -> Step:
    count = torch.tensor(1.0, device=device)
    return Step(learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-8, count=count, coefficient=None)


def _gpu_update_parameters_per_s(count: int, device: torch.device) -> float:
    weight = _random(count, device=device).requires_grad_()
    weight.grad = _random(count, device=device)
    adamw = torch.optim.AdamW([weight], fused=True)
    return count / _median_s(Stopwatch(device), adamw.step)


def _cpu_memory_bytes_per_s(size: int) -> float:
    """Bytes read and written per second by two threads at once, each of which copies `size` bytes."""
    count = 2 if (os.cpu_count() or 1) > 1 else 1
    with contextlib.ExitStack() as stack:
        for _ in range(count - 1):
            stack.enter_context(_copying(size))
        source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        one_s = _median_s(Stopwatch(torch.device("cpu")), lambda: target.copy_(source))
    return count * _COPY_TRAFFIC * size / one_s


def _launch_s(device: torch.device) -> float:
    """Seconds that the host takes to issue a block's forward. 0 on the CPU, which computes as it issues: block times
    include it."""
    if device.type != "cuda":
        return 0.0
    x = torch.ones(64, device=device)
    clock = Stopwatch(torch.device("cpu"))
    operation_s = _median_s(clock, lambda: [x + 1 for _ in range(100)]) / 100
    torch.cuda.synchronize(device)
    return _BLOCK_OPERATIONS * operation_s


def _operation_s(device: torch.device) -> float:
    """Seconds that the host spends to issue one operation on a weight that is on the device for a while: allocation,
    fetch or release, with its events. 0 if the CPU is the device: the times of its copies include it."""
    if device.type != "cuda":
        return 0.0
    host, other = torch.zeros(_RANDOM // 4, pin_memory=True), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    allocated, arrived = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]

    def fetches() -> None:
        for _ in range(_FETCHES):
            on_device = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
            allocated.record(stream)
            other.wait_event(allocated)
            with torch.cuda.stream(other):
                on_device.copy_(host, non_blocking=True)
            arrived.record(other)
            stream.wait_event(arrived)
            del on_device

    watch = Stopwatch(device)
    issued_s = []
    for _ in range(1 + _REPEATS):
        watch.seconds(fetches)
        issued_s.append(watch.issued_s)
    return statistics.median(issued_s[1:]) / (3 * _FETCHES)


def _flops_per_s(device: torch.device, dtype: torch.dtype, watch: Stopwatch) -> float:
    size = 4096 if device.type == "cuda" else 512  # CPUs without bfloat16 take seconds for more
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _median_s(watch, lambda: a @ b)


def _shared_compute(device: torch.device) -> float:
    """The share of speed that computing loses while other work with as many threads runs on the same cores."""
    if device.type == "cuda":
        return 0.0
    return max(0.0, 1 - len(os.sched_getaffinity(0)) / (2 * torch.get_num_threads()))


def _device_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """A GPU's memory traffic in bytes per second, which is a guess, and its FLOPs per second, from the number of its
    multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    flops = properties.multi_processor_count * 128 * 2 * 1.4e9  # fp32 lanes at a usual clock
    return 300e9, flops * (4 if dtype is not torch.float32 else 1)


def _cpu_flops() -> float:
    return torch.get_num_threads() * 30e9


def _median_s(watch: Stopwatch, function: Callable[[], object], repeats: int = _REPEATS) -> float:
    function()
    return max(statistics.median(watch.seconds(function) for _ in range(repeats)), 1e-9)


@contextlib.contextmanager
def _copying(size: int) -> Iterator[None]:
    """A context in which another thread copies `size` bytes in host memory again and again."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    done, begun = threading.Event(), threading.Event()

    def copy() -> None:
        while not done.is_set():
            target.copy_(source)
            begun.set()

    thread = threading.Thread(target=copy, name="copying", daemon=True)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()
