"""The graphics card by what its driver says of it. Nothing here makes a CUDA context: that would take some hundred MiB
of the card from a job that runs, and what is free then says nothing about what will be free for the job to come."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace

import torch

from planner.hardware import Hardware
from planner.presets import is_preset, preset, usable_gpu_bytes
from planner.probe import cpu_bytes, machine_name

_PATIENCE_S = 30.0
_FLOPS_PER_S = 8e12  # fp32, of a small card; a bf16 product runs at twice that at least
_MEMORY_BYTES_PER_S = 300e9
_LINK_BYTES_PER_S = 12e9
_HOST_BYTES_PER_S = 20e9
_UPDATE_BYTES = 28  # AdamW in fp32 reads weight, gradient and moments, writes weight and moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Name and built-in memory of a card."""

    name: str
    memory_bytes: int


def ask_card() -> Card:
    """The card that a process which uses CUDA would take."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    command = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits", f"--id={visible or 0}"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE_S).stdout
        return parse_card(said)
    except (OSError, subprocess.SubprocessError, ValueError):  # no such tool: properties need no context either
        properties = torch.cuda.get_device_properties(0)
        return Card(name=properties.name, memory_bytes=properties.total_memory)


def parse_card(text: str) -> Card:
    """The card of a line "12288, NVIDIA GeForce RTX 3060" (MiB). Raises ValueError."""
    size, comma, name = text.strip().partition("\n")[0].partition(",")
    if not (comma and size.strip().isdigit() and name.strip()):
        raise ValueError(f"not a card: {text[:80]!r}")
    return Card(name=name.strip(), memory_bytes=int(size) * 2**20)


def estimate_card(card: Card, dtype: torch.dtype) -> Hardware:
    """This host with `card`, computing in `dtype`: rates of its maker where they are known, else modest ones; memory as
    built in, less a reserve."""
    model, bf16 = card.name.removeprefix("NVIDIA "), dtype is not torch.float32
    if is_preset(model):
        known = preset(model, bf16=bf16)
    else:
        known = Hardware(
            name=card.name, gpu_bytes=0, cpu_bytes=0, h2d_bytes_per_s=_LINK_BYTES_PER_S,
            d2h_bytes_per_s=_LINK_BYTES_PER_S, gpu_update_parameters_per_s=_MEMORY_BYTES_PER_S / _UPDATE_BYTES,
            cpu_update_parameters_per_s=_HOST_BYTES_PER_S / 2 / _UPDATE_BYTES,
            cpu_memory_bytes_per_s=_HOST_BYTES_PER_S, launch_s=0.75e-3,
            min_transfer_bytes=int(20e-6 * _LINK_BYTES_PER_S), flops_per_s=_FLOPS_PER_S * (2 if bf16 else 1),
        )  # fmt: skip
    return replace(
        known,
        name=machine_name(card.name),
        gpu_bytes=max(2**20, usable_gpu_bytes(card.memory_bytes)),
        cpu_bytes=cpu_bytes(torch.device("cuda")),
    )
