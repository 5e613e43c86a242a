"""Estimates how long Python takes to launch what the device computes. If launching takes longer than computing, the
device waits for it."""

from __future__ import annotations

from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain, Option
from planner.schedule.plan import Direction, stage_order


def issue_s(option: Option, direction: Direction, hardware: Hardware) -> float:
    """Seconds that Python needs to launch the kernels of one block for one slice (micro-batch) under `option`: as
    measured, or the machine's `launch_s`."""
    forward = option.issue_forward_s if direction is not Direction.BACKWARD else 0.0
    backward = option.issue_backward_s if direction is not Direction.FORWARD else 0.0
    return (forward + backward) or hardware.launch_s


def least_issue_s(chain: Chain, hardware: Hardware, slices: int) -> float:
    """Seconds that Python needs to launch the kernels of all blocks for all slices (micro-batches) of a round, each
    block under the option that takes least. Operations between blocks, such as copies, are not counted."""
    stages = stage_order(len(chain.blocks))
    if not any(o.issue_forward_s or o.issue_backward_s for block in chain.blocks for o in block.options):
        return hardware.launch_s * slices * len(stages)
    return slices * sum(
        min(issue_s(option, direction, hardware) for option in chain.blocks[index].options)
        for direction, index in stages
    )
