"""Lists machines that people have, by name: graphics cards with their makers' figures, links to the host, usual hosts.

Cards: memory, memory bandwidth, FP32 rate (at the boost clock) and link are those of NVIDIA's product pages and
architecture papers: Ampere GA102 v2.0 and A100, Ada v1.1, RTX Blackwell, Hopper H100, the H200 data sheet. BF16 with
FP32 accumulation, dense: from the same papers; on GeForce it is twice the FP32 rate (GA10x: 4 tensor cores × 64
multiply-adds per clock and multiprocessor against 128 lanes; Ada and Blackwell keep the ratio).

Links: PCIe's raw rate per direction (8, 16 and 32 GT/s per lane, 128b/130b), of which large copies from pinned memory
reach about 80% while the other direction is busy.

Drives: makers' rates of 2 TB drives of each generation, three bits a cell. The sustained rate is that of filling a
whole drive in TechPowerUp's reviews ("write intensive usage"): 0.4 to 0.8 GB/s, 1.0 to 1.5 (the best 3), 1.1 to 1.5.

Hosts: two channels of DDR4-3200 (51.2 GB/s) beside PCIe 3 and 4 cards of the 30 series, of DDR5-5600 (89.6 GB/s) beside
later ones; eight channels of DDR4-3200 or DDR5-4800 (204.8, 307.2 GB/s) in a server.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace

from planner.errors import Exit, UserError
from planner.machine.drives import RATED_SIZES
from planner.machine.hardware import Hardware
from planner.machine.traffic import UPDATE_TRAFFIC_BYTES
from planner.units import format_bytes, parse_bytes

_GIB = 2**30
_MIB = 2**20

BF16_SHARE = 0.8
"""The share of the makers' rates that large matrix products reach: an H200 does 790 of 989 TFLOP/s."""
FP32_SHARE = 0.7
"""The share of the makers' FP32 rates (without tensor cores) that a training step reaches: Llama2-7B on an RTX 3060
came to 8.1 of 12.7 TFLOP/s with all other operations."""
MEMORY_SHARE = 0.8
"""The share of the device's memory bandwidth that element-wise operations and updates reach."""
HOST_SHARE = 0.75
"""The share of the host's memory bandwidth that all its users together reach."""
CPU_UPDATE_SHARE = 0.6
"""The share of the host's memory bandwidth that updates reach while copies run beside them."""
LINK_SHARE = 0.8
_LAUNCH_S = 0.75e-3  # a block's forward launches about 150 operations, 5 µs each
_COPY_LATENCY_S = 20e-6
_CONTEXT_BYTES = 400 * _MIB  # CUDA's own, with the libraries' workspaces


LINKS = {
    f"pcie{generation}x{lanes}": lanes * transfers_per_s * 128 / 130 / 8
    for generation, transfers_per_s in ((3, 8e9), (4, 16e9), (5, 32e9))
    for lanes in (4, 8, 16)
}
"""Raw bytes per second in each direction, by the name of the link, such as "pcie4x16"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A graphics card in a typical machine. `link`: a name of `LINKS`. `host_bytes_per_s`: the host's memory
    bandwidth."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    fp32_flops_per_s: float
    bf16_flops_per_s: float
    link: str
    host_memory_bytes: int
    host_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRates:
    """Rates of an ordinary NVMe drive in bytes per second. `sustained`: writing for hours, when its fast cache
    is full."""

    read: float
    write: float
    sustained: float


DRIVES = {
    "pcie3": DriveRates(read=3.4e9, write=2.8e9, sustained=0.6e9),
    "pcie4": DriveRates(read=7e9, write=5e9, sustained=1.5e9),
    "pcie5": DriveRates(read=10e9, write=8e9, sustained=1.5e9),
}
_DRIVE_BYTES = 2 * 10**12


def _geforce(name: str, gib: int, gb_per_s: float, tflops: float, link: str, *, ddr5: bool = True) -> Card:
    return Card(
        name=f"GeForce {name}",
        memory_bytes=gib * _GIB,
        memory_bytes_per_s=gb_per_s * 1e9,
        fp32_flops_per_s=tflops * 1e12,
        bf16_flops_per_s=2 * tflops * 1e12,
        link=link,
        host_memory_bytes=64 * _GIB,
        host_bytes_per_s=89.6e9 if ddr5 else 51.2e9,
    )


def _server(name: str, gib: int, gb_per_s: float, fp32: float, bf16: float, link: str, host_gb_per_s: float) -> Card:
    return Card(
        name=name,
        memory_bytes=gib * _GIB,
        memory_bytes_per_s=gb_per_s * 1e9,
        fp32_flops_per_s=fp32 * 1e12,
        bf16_flops_per_s=bf16 * 1e12,
        link=link,
        host_memory_bytes=512 * _GIB,
        host_bytes_per_s=host_gb_per_s * 1e9,
    )


CARDS = {
    "rtx3060": _geforce("RTX 3060 12 GB", 12, 360.0, 12.74, "pcie4x16", ddr5=False),
    "rtx3070": _geforce("RTX 3070", 8, 448.0, 20.31, "pcie4x16", ddr5=False),
    "rtx3090": _geforce("RTX 3090", 24, 936.2, 35.58, "pcie4x16", ddr5=False),
    "rtx4060": _geforce("RTX 4060", 8, 272.0, 15.11, "pcie4x8"),
    "rtx4060ti": _geforce("RTX 4060 Ti 16 GB", 16, 288.0, 22.06, "pcie4x8"),
    "rtx4070tisuper": _geforce("RTX 4070 Ti Super", 16, 672.3, 44.10, "pcie4x16"),
    "rtx4080": _geforce("RTX 4080", 16, 716.8, 48.74, "pcie4x16"),
    "rtx4090": _geforce("RTX 4090", 24, 1008.0, 82.58, "pcie4x16"),
    "rtx5060ti": _geforce("RTX 5060 Ti 16 GB", 16, 448.0, 23.70, "pcie5x8"),
    "rtx5090": _geforce("RTX 5090", 32, 1792.0, 104.8, "pcie5x16"),
    "a100": _server("A100 SXM 80 GB", 80, 2039.0, 19.5, 312.0, "pcie4x16", 204.8),
    "h100": _server("H100 SXM 80 GB", 80, 3350.0, 66.9, 989.4, "pcie5x16", 307.2),
    "h200": _server("H200 SXM 141 GB", 131, 4800.0, 66.9, 989.4, "pcie5x16", 307.2),  # 141 × 10^9 bytes
}


def preset(name: str, *, bf16: bool, cpu_memory_bytes: int | None = None, link: str | None = None) -> Hardware:
    """The machine with the graphics card called `name` ("rtx3060", "RTX 3060"), computing in bf16 or fp32.

    `cpu_memory_bytes`: the host's whole memory (None: a typical host's). `link`: a name of `LINKS`, or bytes per second
    like "12GB". The memory that a job may use is less than what is built in, as in `planner.measure.machine_rates`.
    Raises UserError for names that are not known.
    """
    card = CARDS[_known(name, CARDS, "hardware")]
    rate = _link_bytes_per_s(link or card.link)
    host = card.host_memory_bytes if cpu_memory_bytes is None else cpu_memory_bytes
    if usable_cpu_bytes(host) <= 0:
        raise UserError(
            f"--cpu-memory {format_bytes(host)} leaves no memory for a job.",
            code="bad-value",
            exit_code=Exit.USAGE,
            numbers=(f"the system needs {format_bytes(host - usable_cpu_bytes(host))}",),
            hint="give the machine's whole memory with its unit: --cpu-memory 32GiB",
        )
    return Hardware(
        name=card.name,
        gpu_bytes=usable_gpu_bytes(card.memory_bytes),
        cpu_bytes=usable_cpu_bytes(host),
        h2d_bytes_per_s=rate,
        d2h_bytes_per_s=rate,
        gpu_update_parameters_per_s=MEMORY_SHARE * card.memory_bytes_per_s / UPDATE_TRAFFIC_BYTES,
        cpu_update_parameters_per_s=CPU_UPDATE_SHARE * card.host_bytes_per_s / UPDATE_TRAFFIC_BYTES,
        cpu_memory_bytes_per_s=HOST_SHARE * card.host_bytes_per_s,
        launch_s=_LAUNCH_S,
        min_transfer_bytes=int(_COPY_LATENCY_S * rate),
        flops_per_s=BF16_SHARE * card.bf16_flops_per_s if bf16 else FP32_SHARE * card.fp32_flops_per_s,
    )


def with_drives(hardware: Hardware, name: str) -> Hardware:
    """The machine with a drive for optimizer states; `name` is one of `DRIVES` ("pcie4"), or several of one kind
    ("2xpcie4"), which count as one drive that is so many times as fast and as large. Raises UserError for names that
    are not known."""
    count, _, kind = name.rpartition("x")
    number = int(count) if count.isdigit() else 0
    rates = DRIVES[_known(kind if number else name, DRIVES, "drive")]
    number = number or 1
    return replace(
        hardware,
        disk_read_bytes_per_s=number * rates.read,
        disk_write_bytes_per_s=number * rates.write,
        disk_sustained_bytes_per_s=number * rates.sustained,
        disk_bytes=number * _DRIVE_BYTES,
        disk_rated_bytes=number * _DRIVE_BYTES * RATED_SIZES,
    )


def is_preset(name: str) -> bool:
    """Whether `name` is the name of a known graphics card, such as "rtx3060"."""
    return _plain(name) in CARDS


def usable_gpu_bytes(memory_bytes: int) -> int:
    """Bytes that a job may use of a card with `memory_bytes`, if the card also serves the desktop; rounded down to 128
    MiB."""
    usable = memory_bytes - _CONTEXT_BYTES - max(256 * _MIB, memory_bytes // 50)
    return usable // (128 * _MIB) * 128 * _MIB


def usable_cpu_bytes(memory_bytes: int) -> int:
    """Bytes that a job may use of a host's memory of `memory_bytes`: all except the system's share."""
    return (memory_bytes - max(_GIB, memory_bytes // 10)) // _MIB * _MIB


def needed_cpu_memory(usable_bytes: int) -> int:
    """Bytes of the smallest host memory, of the sizes that are sold, of which a job may use `usable_bytes`."""
    sizes = itertools.chain((8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768), itertools.count(1024, 512))
    return next(size * _GIB for size in sizes if usable_cpu_bytes(size * _GIB) >= usable_bytes)


def _link_bytes_per_s(link: str) -> float:
    if link[:1].isdigit():
        try:
            rate = parse_bytes(link)
        except ValueError:
            rate = 0
        if rate > 0:
            return float(rate)
    return LINK_SHARE * LINKS[_known(link, LINKS, "link")]


def _plain(name: str) -> str:
    return "".join(name.lower().removeprefix("geforce").split()).replace("-", "").replace("_", "").replace(".0", "")


def _known(name: str, table: Collection[str], kind: str) -> str:
    plain = _plain(name)
    if plain in table:
        return plain
    near = difflib.get_close_matches(plain, table, n=1)
    raise UserError(
        f"There is no {kind} called {name}.",
        code=f"unknown-{kind}",
        numbers=(f"known are {', '.join(table)}",),
        hint=f"did you mean {near[0]}?" if near else "",
        exit_code=Exit.USAGE,
    )
