"""Makes machines from names: of a graphics card (`planner/machine/cards.py` lists them), its link, and drives.

Links: PCIe's raw rate per direction (8, 16 and 32 GT/s per lane, 128b/130b), of which large copies from pinned memory
reach about 80% while the other direction is busy.

Drives: makers' rates of 2 TB drives of each generation, three bits a cell. The sustained rate is that of filling a
whole drive in TechPowerUp's reviews ("write intensive usage"): 0.4 to 0.8 GB/s, 1.0 to 1.5 (the best 3), 1.1 to 1.5.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import Exit, UserError
from planner.machine.card_names import card_named, find_card
from planner.machine.cards import CARDS, HOSTS, USUAL
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


def preset(name: str, *, bf16: bool, cpu_memory_bytes: int | None = None, link: str | None = None) -> Hardware:
    """The machine with the graphics card called `name` ("rtx3060", "RTX 3060"), computing in bf16 or fp32.

    `cpu_memory_bytes`: the host's whole memory (None: a typical host's). `link`: a name of `LINKS`, or bytes per second
    like "12GB". The memory that a job may use is less than what is built in, as in `planner.measure.machine_rates`.
    Raises UserError for names that are not known.
    """
    card = CARDS[card_named(name)]
    host = HOSTS[card.host]
    cpu_memory = host.memory_bytes if cpu_memory_bytes is None else cpu_memory_bytes
    if usable_cpu_bytes(cpu_memory) <= 0:
        raise UserError(
            f"--cpu-memory {format_bytes(cpu_memory)} leaves no memory for a job.",
            code="bad-value",
            exit_code=Exit.USAGE,
            numbers=(f"the system needs {format_bytes(cpu_memory - usable_cpu_bytes(cpu_memory))}",),
            hint="give the machine's whole memory with its unit: --cpu-memory 32GiB",
        )
    flops_per_s = FP32_SHARE * card.fp32_flops_per_s
    if bf16 and card.bf16_flops_per_s is not None:  # else bf16 is emulated
        flops_per_s = BF16_SHARE * card.bf16_flops_per_s
    return Hardware(
        name=card.name,
        gpu_bytes=usable_gpu_bytes(card.memory_bytes),
        cpu_bytes=usable_cpu_bytes(cpu_memory),
        gpu_update_parameters_per_s=MEMORY_SHARE * card.memory_bytes_per_s / UPDATE_TRAFFIC_BYTES,
        cpu_update_parameters_per_s=CPU_UPDATE_SHARE * host.bytes_per_s / UPDATE_TRAFFIC_BYTES,
        cpu_memory_bytes_per_s=HOST_SHARE * host.bytes_per_s,
        launch_s=_LAUNCH_S,
        flops_per_s=flops_per_s,
        **link_figures(link or card.link),
    )


def computes_bf16(name: str) -> bool:
    """Whether the card called `name` has tensor cores for bf16. True for a name that no card has."""
    card = find_card(name)
    return card is None or CARDS[card].bf16_flops_per_s is not None


def smallest_card(job_bytes: int) -> str | None:
    """The short name of the usual card with the least memory of which a job may use `job_bytes`; None if none has as
    much."""
    enough = (name for name in USUAL if usable_gpu_bytes(CARDS[name].memory_bytes) >= job_bytes)
    return next(enough, None)


def with_drives(hardware: Hardware, name: str) -> Hardware:
    """The machine with the drives called `name`, as in `drive_figures`, for optimizer states. Raises UserError."""
    return replace(hardware, **drive_figures(name))


def link_figures(link: str) -> dict[str, Any]:
    """The fields of `Hardware` that a link to the card decides. `link`: a name of `LINKS`, or bytes per second like
    "12GB". Raises UserError for names that are not known."""
    rate = _link_bytes_per_s(link)
    return {
        "h2d_bytes_per_s": rate,
        "d2h_bytes_per_s": rate,
        "min_transfer_bytes": int(_COPY_LATENCY_S * rate),
    }


def drive_figures(name: str) -> dict[str, Any]:
    """The fields of `Hardware` that drives decide. `name`: one of `DRIVES` ("pcie4"), or several of one kind
    ("2xpcie4"), which count as one drive that is so many times as fast and as large. Raises UserError for names that
    are not known."""
    count, _, kind = name.rpartition("x")
    number = int(count) if count.isdigit() else 0
    rates = DRIVES[_known(kind if number else name, DRIVES, "drive")]
    number = number or 1
    return {
        "disk_read_bytes_per_s": number * rates.read,
        "disk_write_bytes_per_s": number * rates.write,
        "disk_sustained_bytes_per_s": number * rates.sustained,
        "disk_bytes": number * _DRIVE_BYTES,
        "disk_rated_bytes": number * _DRIVE_BYTES * RATED_SIZES,
    }


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
    return "".join(name.lower().split()).replace("-", "").replace("_", "").replace(".0", "")


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
