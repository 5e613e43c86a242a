"""Finds what this machine has, as far as possible without torch: its card, and the total and free memory of card and
host. Refuses memory budgets above it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from planner.errors import Exit, UserError
from planner.units import SMALLEST_BUDGET_BYTES, format_bytes, format_bytes_down

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, WSL's, AMD's
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A graphics card: its name and its built-in memory in bytes."""

    name: str
    memory_bytes: int


def driver_card() -> Card:
    """The graphics card that a process with CUDA would use, according to nvidia-smi. Raises OSError, SubprocessError or
    ValueError if that gives no answer."""
    return parse_card(_asked("memory.total,name"))


def computes_bf16() -> bool | None:
    """Whether jobs on this machine compute in bf16: cards can from the RTX 30 series (compute capability 8) on. None if
    there is no card, or no driver that answers, as when a plan is made for another machine."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        return float(_asked("compute_cap")) >= 8
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def has_gpu() -> bool:
    """Whether the driver has made a device file for a graphics card on this machine, whether or not the card
    answers."""
    return any(Path(device).exists() for device in _GPU_DEVICES)


def _asked(field: str) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", f"--id={visible or 0}"]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=_PATIENCE_S
    ).stdout


def parse_card(text: str) -> Card:
    """The graphics card described by a line such as "12288, NVIDIA GeForce RTX 3060", with memory in MiB. Raises
    ValueError."""
    size, comma, name = text.strip().partition("\n")[0].partition(",")
    if not (comma and size.strip().isdigit() and name.strip()):
        raise ValueError(f"not a card: {text[:80].strip()}")
    return Card(name=name.strip(), memory_bytes=int(size) * 2**20)


def ram_bytes() -> int:
    """The host's memory in bytes, or the limit of this process's control group if that is lower."""
    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            return min(total, int(Path(path).read_text("ascii")))
    return total


def free_ram_bytes() -> int:
    """The free part of the host's memory, in bytes. Inside a control group, what its other processes use is not
    subtracted."""
    return min(int(psutil.virtual_memory().available), ram_bytes())


def device_bytes() -> int | None:
    """Bytes of the memory of the device on which jobs run: the graphics card's, or the host's if there is no GPU. None
    if there seems to be a card, but its driver does not answer."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ram_bytes()
    try:
        return driver_card().memory_bytes
    except (OSError, subprocess.SubprocessError, ValueError):
        return None if has_gpu() else ram_bytes()


def check_budgets_here(gpu_budget: int | None, cpu_budget: int | None) -> None:
    """Raise UserError if a memory budget (bytes; None: not given) is above what this machine has, as far as that is
    known without torch, or so small that its unit must have been forgotten."""
    for key, budget in (("gpu_budget", gpu_budget), ("cpu_budget", cpu_budget)):
        if budget is not None and budget < SMALLEST_BUDGET_BYTES:
            raise UserError(
                f"{key} is {budget} bytes: a number without a unit counts bytes.",
                code="bad-value",
                exit_code=Exit.USAGE,
                hint=f"give it with its unit: {budget}GB",
            )
    gpu_bytes = None if gpu_budget is None else device_bytes()
    check_budgets(gpu_budget, cpu_budget, gpu_bytes=gpu_bytes, ram_bytes=ram_bytes())


def check_budgets(gpu_budget: int | None, cpu_budget: int | None, *, gpu_bytes: int | None, ram_bytes: int) -> None:
    """Raise UserError if a budget exceeds the memory of the device (`gpu_bytes`; None: not known) or of the host
    (`ram_bytes`). All in bytes."""
    for key, budget, limit, of in (
        ("gpu_budget", gpu_budget, gpu_bytes, "the device"),
        ("cpu_budget", cpu_budget, ram_bytes, "the host"),
    ):
        if budget is not None and limit is not None and budget > limit:
            raise UserError(
                f"{key} is more than {of} has.",
                code="budget-too-large",
                exit_code=Exit.USAGE,
                numbers=(f"{key} {format_bytes(budget)}, {of} has {format_bytes_down(limit)}",),
                hint=f"give a smaller {key}, or leave it out",
            )
