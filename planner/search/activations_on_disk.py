"""Puts activations on a drive that the job names, where the host's memory has no room for all activations that leave
the device.

Activations are written after their forward and read before their backward, once in each round. Each block option that
offloads activations to the host gets a twin that passes them on to disk, and the integer program chooses between the
two. So those activations are kept or moved that save the most computing for their bytes, which is the order of LoHan
(paper 003), as far as the drive's rate, room and remaining write endurance allow.
"""

from __future__ import annotations

from dataclasses import replace

from planner.schedule.chain import Block, Chain, Option
from planner.search.problem import Problem
from planner.search.states_on_disk import hope_s, with_states_on_disk

_WORTH = 0.03  # of a step: a smaller gain is not worth the writing, and rounding to whole blocks loses a part of it
_ON_DISK = "-disk"


def with_states_and_activations_on_disk(problem: Problem) -> Problem:
    """Return the planner's problem with some optimizer states on disk (`with_states_on_disk`) and, where that helps,
    with activations allowed there, too. It helps where the host's memory is too small for all activations and the
    integer program then finds a step that is 3% shorter, or finds any step where it otherwise finds none."""
    if may_be_stored(problem):
        twins = replace(problem, chain=with_twins(problem.chain))
        if hope_s(twins) < (1 - _WORTH) * hope_s(problem):
            return with_states_on_disk(twins)
    return with_states_on_disk(problem)


def may_be_stored(problem: Problem) -> bool:
    """Return whether activations might go to disk: a disk is given, some activations leave the device, and the host has
    no memory for everything that may leave the device."""
    chain = problem.chain
    tensors = sum(t.bytes + t.state_bytes + t.gradient_bytes for t in chain.tensors())
    activations = sum(max(option.offloaded_bytes for option in block.options) for block in chain.blocks)
    full = tensors + problem.slices * activations > problem.cpu_budget_bytes
    return bool(problem.hardware.disk_bytes and problem.activation_offload and activations and full)


def most_on_disk(chain: Chain, slices: int) -> int:
    """Return the most bytes that may be on disk: all optimizer states, trained weights and gradients, and all
    activations of `slices` micro-batches that may leave the device."""
    activations = sum(max(option.offloaded_bytes for option in block.options) for block in chain.blocks)
    trained = sum(t.state_bytes + t.bytes + t.gradient_bytes for t in chain.tensors() if t.trainable)
    return trained + slices * activations


def with_twins(chain: Chain) -> Chain:
    """Return the chain (the model's blocks) with a further option for each option by which a block offloads activations
    to the host: the same, but with these activations on disk."""
    if has_twins(chain):
        return chain
    blocks = tuple(map(_with_twins, chain.blocks))
    known = {(block.kind, option.name) for block in blocks for option in block.options}
    lifetimes = [replace(found, option=found.option + _ON_DISK) for found in chain.lifetimes]
    twins = tuple(found for found in lifetimes if (found.kind, found.option) in known)
    return replace(chain, blocks=blocks, lifetimes=(*chain.lifetimes, *twins))


def has_twins(chain: Chain) -> bool:
    """Return whether any block of the chain has an option by which it puts activations on disk."""
    return any(option.on_disk for block in chain.blocks for option in block.options)


def _with_twins(block: Block) -> Block:
    travel = [option for option in block.options if option.offloaded_bytes]
    return replace(block, options=(*block.options, *map(_twin, travel)))


def _twin(option: Option) -> Option:
    return replace(option, name=option.name + _ON_DISK, on_disk=True)
