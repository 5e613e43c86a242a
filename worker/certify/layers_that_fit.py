"""Estimates the memory that a model takes in plain PyTorch, and how many of its layers fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil
import torch

from planner.errors import Exit, UserError
from planner.measure.machine_rates import gpu_bytes
from planner.schedule.chain import Block, Chain, Tensor
from planner.units import format_bytes

_MARGIN = 1.15  # autograd keeps more than the traced blocks do; the allocator has gaps
_HOST_SHARE = 0.8  # share of the free host memory to use


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A job's chain, and the bytes that the device has for it."""

    chain: Chain
    there_bytes: int

    @classmethod
    def of(cls, chain: Chain, device: torch.device) -> Room:
        """The chain with the room that `device` has: a GPU's budget, or a share of the free host memory."""
        free = int(_HOST_SHARE * psutil.virtual_memory().available)
        return cls(chain=chain, there_bytes=gpu_bytes(device) if device.type == "cuda" else free)

    @property
    def all_layers(self) -> int:
        """The number of layers of the whole model."""
        return len(self.chain.blocks) - 2

    def layers(self) -> int:
        """How many layers of the model fit. Raises UserError "no-room" when not even one does."""
        found = next((n for n in range(self.all_layers, 0, -1) if plain_bytes(self.shorter(n)) <= self.there_bytes), 0)
        if found == 0:
            raise UserError(
                "There is no room for even one layer of this model in plain PyTorch.",
                code="no-room",
                exit_code=Exit.DOES_NOT_FIT,
                numbers=(
                    f"needed {format_bytes(plain_bytes(self.shorter(1)))}, there are {format_bytes(self.there_bytes)}",
                ),
                hint="certify a job of the same model with a smaller per_device_train_batch_size or max_length",
            )
        return found

    def shorter(self, layers: int) -> Chain:
        """The chain with its first `layers` layers only."""
        first, *middle, last = self.chain.blocks
        return replace(self.chain, blocks=(first, *middle[:layers], last))


def plain_bytes(chain: Chain) -> int:
    """About the bytes that a step of plain PyTorch takes: all tensors resident, all activations kept, one slice at a
    time."""
    tensors = sum(map(_tensor_bytes, (*chain.tensors(), *chain.frame_tensors)))
    buffers = chain.frame_bytes - sum(t.bytes + t.state_bytes for t in chain.frame_tensors)
    kept = sum(map(_kept_bytes, chain.blocks))
    return int(_MARGIN * (tensors + buffers + kept + chain.blocks[-1].options[0].forward_peak_bytes))


def _tensor_bytes(tensor: Tensor) -> int:
    """Bytes of weight, gradient and states, and of the fp32 form of a narrower gradient. Moments count as fp32."""
    converted = 4 * tensor.elements if tensor.trainable and tensor.gradient_bytes < 4 * tensor.elements else 0
    moments = tensor.optimizer.moment_bytes(tensor.elements)
    wide = sum(4 * tensor.elements - size for size in moments) if tensor.trainable else 0
    return tensor.bytes + tensor.gradient_bytes + converted + tensor.state_bytes + wide


def _kept_bytes(block: Block) -> int:
    return block.input_bytes + max(option.saved_bytes for option in block.options)
