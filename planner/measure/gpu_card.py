"""Describes the graphics card by what its driver says, without creating a CUDA context. A context would take some
hundred MiB of the card from a running job; and the memory that is free now is not what the next job will find free."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace

import torch

from planner.machine.card_names import find_card
from planner.machine.hardware import Hardware
from planner.machine.presets import preset, usable_gpu_bytes
from planner.machine.this_machine import Card, driver_card
from planner.machine.traffic import UPDATE_TRAFFIC_BYTES
from planner.measure.machine_rates import cpu_bytes, machine_name
from planner.schedule.peak_moments import staged_size

_FLOPS_PER_S = 8e12  # a small card in fp32; bf16 products run at least twice as fast
_MEMORY_BYTES_PER_S = 300e9
_LINK_BYTES_PER_S = 12e9
_HOST_BYTES_PER_S = 20e9
_WORKSPACE_BYTES, _WORKSPACE_BYTES_SM90 = 8320 * 2**10, 32 * 2**20
_GRAIN_BYTES = 512  # PyTorch's allocator rounds up to it
_LIGHT_WORKSPACE_BYTES = 2**20  # cuBLASLt's; it is never larger than cuBLAS's


def ask_card() -> Card:
    """The name and memory of the card that a process would use through CUDA, without touching the card."""
    try:
        return driver_card()
    except (OSError, subprocess.SubprocessError, ValueError):  # no such tool; properties need no context either
        properties = torch.cuda.get_device_properties(0)
        return Card(name=properties.name, memory_bytes=properties.total_memory)


def workspace_bytes(device: torch.device) -> int:
    """Bytes that matrix products keep on the device for each thread that issues them, from its first product on; 0 for
    the CPU. They are the workspaces of cuBLAS and cuBLASLt as PyTorch allocates them (`getChosenWorkspaceSize`,
    `getCUDABlasLtWorkspaceSize` in its CublasHandlePool.cpp): each thread has its own handle, and each handle a
    workspace."""
    if device.type != "cuda":
        return 0
    configured = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if configured:
        cublas_bytes = sum(int(size) * int(count) for size, count in configured) * 2**10
    else:
        cublas_bytes = _WORKSPACE_BYTES if torch.cuda.get_device_capability(device)[0] < 9 else _WORKSPACE_BYTES_SM90
    light = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return cublas_bytes + min(cublas_bytes, int(light) * 2**10 if light.isdigit() else _LIGHT_WORKSPACE_BYTES)


def staged_bytes(batch: Mapping[str, torch.Tensor]) -> int:
    """Device bytes of the inputs of one micro-batch like `batch`. Before a step begins, the inputs of all its
    micro-batches are copied to the device at once; this is one micro-batch's part, rounded up as PyTorch's allocator
    does."""
    return -(-sum(staged_size(tensor.nbytes) for tensor in batch.values()) // _GRAIN_BYTES) * _GRAIN_BYTES


def scalar_bytes(device: torch.device) -> int:
    """Device bytes of scalars: the losses and the gradient norm of the step before, which somebody may still be
    reading, and on CUDA, where copies are asynchronous, the coefficient for clipping."""
    return 2 * _GRAIN_BYTES + (_GRAIN_BYTES if device.type == "cuda" else 0)


def estimate_card(card: Card, dtype: torch.dtype) -> Hardware:
    """This host with the graphics card `card`, with estimated rates for a model that computes in `dtype`. Rates are
    the maker's if the card is known, else those of a small card. Its memory is the installed memory, less a reserve."""
    bf16 = dtype is not torch.float32
    size = f"{round(card.memory_bytes / 2**30)} GB"  # the driver's name lacks it
    if (name := find_card(f"{card.name} {size}") or find_card(card.name)) is not None:
        known = preset(name, bf16=bf16)
    else:
        known = Hardware(
            name=card.name,
            gpu_bytes=0,
            cpu_bytes=0,
            h2d_bytes_per_s=_LINK_BYTES_PER_S,
            d2h_bytes_per_s=_LINK_BYTES_PER_S,
            gpu_update_parameters_per_s=_MEMORY_BYTES_PER_S / UPDATE_TRAFFIC_BYTES,
            cpu_update_parameters_per_s=_HOST_BYTES_PER_S / 2 / UPDATE_TRAFFIC_BYTES,
            cpu_memory_bytes_per_s=_HOST_BYTES_PER_S,
            launch_s=0.75e-3,
            min_transfer_bytes=int(20e-6 * _LINK_BYTES_PER_S),
            flops_per_s=_FLOPS_PER_S * (2 if bf16 else 1),
        )
    return replace(
        known,
        name=machine_name(card.name),
        gpu_bytes=max(2**20, usable_gpu_bytes(card.memory_bytes)),
        cpu_bytes=cpu_bytes(torch.device("cuda")),
    )
