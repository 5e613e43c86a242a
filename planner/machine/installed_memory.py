"""Finds how much memory this machine has, as far as possible without torch, and refuses budgets above it."""

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
    """Name and built-in memory of a card."""

    name: str
    memory_bytes: int


def driver_card() -> Card:
    """The card that a process with CUDA would use, as the driver's tool says. Raises OSError, SubprocessError or
    ValueError when the tool does not say."""
    return parse_card(_asked("memory.total,name"))


def computes_bf16() -> bool | None:
    """Whether jobs compute in bf16 here: cards can from the RTX 30 (compute capability 8) on. None where there is no
    card, or no driver that answers, as when a plan is made for another machine."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        return float(_asked("compute_cap")) >= 8
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def has_gpu() -> bool:
    """Whether a driver has made a device file for a card here, whether or not the card answers."""
    return any(Path(device).exists() for device in _GPU_DEVICES)


def _asked(field: str) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", f"--id={visible or 0}"]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=_PATIENCE_S
    ).stdout


def parse_card(text: str) -> Card:
    """The card of a line "12288, NVIDIA GeForce RTX 3060" (MiB). Raises ValueError."""
    size, comma, name = text.strip().partition("\n")[0].partition(",")
    if not (comma and size.strip().isdigit() and name.strip()):
        raise ValueError(f"not a card: {text[:80].strip()}")
    return Card(name=name.strip(), memory_bytes=int(size) * 2**20)


def ram_bytes() -> int:
    """The host's memory, or what this process's control group may use of it."""
    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            return min(total, int(Path(path).read_text("ascii")))
    return total


def free_ram_bytes() -> int:
    """Bytes of `ram_bytes` that are free now; what others in a control group use is not known."""
    return min(int(psutil.virtual_memory().available), ram_bytes())


def device_bytes() -> int | None:
    """The memory of the device that jobs run on: a card's, or the host's where there is no GPU. None where there seems
    to be a card, but its driver does not answer."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ram_bytes()
    try:
        return driver_card().memory_bytes
    except (OSError, subprocess.SubprocessError, ValueError):
        return None if has_gpu() else ram_bytes()


def check_budgets_here(gpu_budget: int | None, cpu_budget: int | None) -> None:
    """`check_budgets` for this machine, as far as it is known without torch. Also raises UserError for numbers so small
    that their unit must have been forgotten."""
    for key, budget in (("gpu_budget", gpu_budget), ("cpu_budget", cpu_budget)):
        if budget is not None and budget < SMALLEST_BUDGET_BYTES:
            raise UserError(
                f"{key} is {budget} bytes, as a number without a unit is.",
                code="bad-value",
                exit_code=Exit.USAGE,
                hint=f"give it with its unit: {budget}GB",
            )
    gpu_bytes = None if gpu_budget is None else device_bytes()
    check_budgets(gpu_budget, cpu_budget, gpu_bytes=gpu_bytes, ram_bytes=ram_bytes())


def check_budgets(gpu_budget: int | None, cpu_budget: int | None, *, gpu_bytes: int | None, ram_bytes: int) -> None:
    """Raise UserError when a budget is more than the device or the host has (None: not known)."""
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
