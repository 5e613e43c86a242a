"""Measures the work of optimizer updates in parameters: how many parameters the chain's slowest optimizer would update
in the same time."""

from __future__ import annotations

from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain, Tensor


def parameters_of(chain: Chain) -> dict[str, int]:
    """Maps the name of each tensor, and of each piece ("NAME#3") of optimizer states that may be on disk, to its number
    of parameters."""
    counts = {t.name: t.elements for t in (*chain.tensors(), *chain.frame_tensors)}
    for tensor in (t for t in chain.tensors() if t.states_on_disk):
        counts |= {f"{tensor.name}#{piece.number}": piece.elements for piece in chain.state_pieces(tensor)}
    return counts


def update_work(chain: Chain, hardware: Hardware) -> tuple[dict[str, float], dict[str, float]]:
    """The work of each update on the device, and on the CPU: two maps from the name of a tensor or piece to a number of
    parameters.

    An optimizer whose time does not follow the number of parameters (Muon, for example) gives seconds; these are
    converted at the chain's update rates. For other optimizers the work is the number of parameters itself.
    """
    parameters: dict[str, float] = dict(parameters_of(chain))
    others = [t for t in (*chain.tensors(), *chain.frame_tensors) if t.trainable]
    on_device = {t.name: gpu_work(t, chain, hardware) for t in others}
    return parameters | on_device, parameters | {t.name: cpu_work(t, chain, hardware) for t in others}


def gpu_work(tensor: Tensor, chain: Chain, hardware: Hardware) -> float:
    """The work of one tensor's update on the device: the number of parameters that the chain's rate updates in that
    time."""
    return tensor.optimizer.gpu_s * chain.update_rates(hardware).gpu or tensor.elements


def cpu_work(tensor: Tensor, chain: Chain, hardware: Hardware) -> float:
    """The work of one tensor's update on the CPU: the number of parameters that the chain's rate updates in that
    time."""
    return tensor.optimizer.cpu_s * chain.update_rates(hardware).cpu or tensor.elements
