"""The work of updates, in parameters: a tensor's own number, or as many as AdamW updates in the same time."""

from __future__ import annotations

from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain, Tensor


def parameters_of(chain: Chain) -> dict[str, int]:
    """The number of parameters of each tensor, and of each piece ("NAME#3") of states that may be on disk."""
    counts = {t.name: t.elements for t in (*chain.tensors(), *chain.frame_tensors)}
    for tensor in (t for t in chain.tensors() if t.states_on_disk):
        counts |= {f"{tensor.name}#{piece.number}": piece.elements for piece in chain.state_pieces(tensor)}
    return counts


def update_work(chain: Chain, hardware: Hardware) -> tuple[dict[str, float], dict[str, float]]:
    """The work of each update on the device, and on the CPU, by the same names: how many parameters are updated in that
    time at the chain's rates. It is the number of parameters itself where the optimizer has no seconds of its own."""
    parameters: dict[str, float] = dict(parameters_of(chain))
    others = [t for t in (*chain.tensors(), *chain.frame_tensors) if t.trainable]
    on_device = {t.name: gpu_work(t, chain, hardware) for t in others}
    return parameters | on_device, parameters | {t.name: cpu_work(t, chain, hardware) for t in others}


def gpu_work(tensor: Tensor, chain: Chain, hardware: Hardware) -> float:
    """The work of one tensor's update on the device."""
    return tensor.optimizer.gpu_s * chain.update_rates(hardware).gpu or tensor.elements


def cpu_work(tensor: Tensor, chain: Chain, hardware: Hardware) -> float:
    """The work of one tensor's update on the CPU."""
    return tensor.optimizer.cpu_s * chain.update_rates(hardware).cpu or tensor.elements
