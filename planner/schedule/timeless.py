"""Takes the times out of a chain, which are a machine's, so that the model's own figures remain."""

from __future__ import annotations

from dataclasses import replace

from planner.optimizers.base import untimed
from planner.schedule.chain import Chain, Option, Tensor


def without_times(chain: Chain) -> Chain:
    """The chain with all times, and all optimizer seconds, set to zero."""
    blocks = tuple(replace(block, options=tuple(map(_option_without_times, block.options))) for block in chain.blocks)
    return replace(
        chain,
        blocks=tuple(replace(b, tensors=tuple(map(_timeless, b.tensors))) for b in blocks),
        frame_tensors=tuple(map(_timeless, chain.frame_tensors)),
    )


def _option_without_times(option: Option) -> Option:
    return replace(option, forward_s=0.0, backward_s=0.0, issue_forward_s=0.0, issue_backward_s=0.0)


def _timeless(tensor: Tensor) -> Tensor:
    return replace(tensor, optimizer=untimed(tensor.optimizer))
