"""Finds what a plan is made for: the device on which blocks are traced, the machine, and its memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from planner.errors import Exit, UserError
from planner.machine.hardware import Hardware
from planner.machine.this_machine import ram_bytes
from planner.measure.gpu_card import ask_card, estimate_card
from planner.measure.machine_rates import estimate_hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """What a plan is made for. `device`: where blocks are traced. `machine` has estimated rates; its sizes are the
    default memory budgets. `gpu_bytes` and `ram_bytes` are all the memory that is installed.

    `final`: whether a plan for this target may be used for training. It may not if the GPU must not be touched now:
    then blocks are traced on the CPU, whose code saves only nearly the same bytes, and the default budget is not what
    will be free.
    """

    device: torch.device
    machine: Hardware
    gpu_bytes: int
    ram_bytes: int
    final: bool


def find_target(device: torch.device, dtype: torch.dtype, *, measure: bool) -> PlanTarget:
    """What plans for `device` are made for. `measure`: the job has the device for itself now. Otherwise another job
    may be running there: then a GPU is neither touched nor asked how much memory is free."""
    if device.type != "cuda":
        ram = ram_bytes()
        return PlanTarget(
            device=device, machine=estimate_hardware(device, dtype), gpu_bytes=ram, ram_bytes=ram, final=True
        )
    if measure:
        total = torch.cuda.mem_get_info(device)[1]
        machine = estimate_hardware(device, dtype)
        return PlanTarget(device=device, machine=machine, gpu_bytes=total, ram_bytes=ram_bytes(), final=True)
    card = ask_card()
    return PlanTarget(
        device=torch.device("cpu"),
        machine=estimate_card(card, dtype),
        gpu_bytes=card.memory_bytes,
        ram_bytes=ram_bytes(),
        final=False,
    )


def device_of(name: str | None) -> torch.device:
    """The device called `name`; None: CUDA if there is a CUDA device, else the CPU. Raises UserError if a CUDA device
    is asked for and missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "There is no CUDA device here.", code="no-cuda", hint="leave --device out", exit_code=Exit.USAGE
        )
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
