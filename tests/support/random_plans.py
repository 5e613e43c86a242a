"""Random plans that `verify` accepts: each tensor's schedule is drawn by itself, and kept where it is right."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from planner.candidate.candidate import Absence, Candidate, Side, TensorSchedule, assemble, at_home, backward_stage
from planner.schedule.chain import Chain, Tensor
from planner.schedule.compile import compile_program
from planner.schedule.plan import Plan
from planner.schedule.verify import InvalidProgram, verify
from tests.support.chains import chain as small_chain

_ATTEMPTS = 40


def random_chain(chance: random.Random) -> Chain:
    """One to five layers, weights in four bytes or in two with a master, some frozen, ends tied."""
    a_chain = small_chain(chance.randint(1, 5), tied=chance.random() < 0.3)
    new = {t.name: _random_tensor(t, chance) for t in a_chain.tensors()}
    blocks = (replace(block, tensors=tuple(new[t.name] for t in block.tensors)) for block in a_chain.blocks)
    return replace(a_chain, blocks=tuple(blocks))


def _random_tensor(tensor: Tensor, chance: random.Random) -> Tensor:
    n = tensor.elements
    if chance.random() < 0.15:
        return replace(tensor, trainable=False, gradient_bytes=0, state_bytes=0)
    return replace(tensor, bytes=2 * n, gradient_bytes=2 * n, state_bytes=12 * n) if chance.random() < 0.5 else tensor


def random_plan(chain: Chain, chance: random.Random, *, slices: int | None = None, clip: bool | None = None) -> Plan:
    """Any options, one to three slices, one to three rounds, with clipping or without; schedules of all kinds.
    `slices` of a step, and `clip`, may be given."""
    if clip is None:
        shape: dict[str, Any] = {
            "slices": chance.randint(1, 3),
            "rounds": chance.choice((1, 1, 2, 3)),
            "clip": chance.random() < 0.4,
        }
        clip = shape["clip"]
    else:
        assert slices is not None
        rounds = chance.choice([n for n in range(1, slices + 1) if slices % n == 0])
        shape = {"slices": slices // rounds, "rounds": rounds, "clip": clip}
    options = tuple(chance.choice(block.options).name for block in chain.blocks)
    candidate = Candidate(
        options=options, schedules=tuple(at_home(chain, t, clip) for t in chain.tensors()), source="random"
    )
    for number, tensor in enumerate(chain.tensors()):
        for _ in range(_ATTEMPTS if len(chain.users()[tensor.name]) == 1 and chance.random() < 0.8 else 0):
            schedules = list(candidate.schedules)
            schedules[number] = _random_schedule(chain, tensor, clip, chance)
            drawn = replace(candidate, schedules=tuple(schedules))
            if _is_right(assemble(chain, drawn, **shape), chain):
                candidate = drawn
                break
    plan = assemble(chain, candidate, **shape)
    verify(compile_program(plan, chain), chain)
    return plan


def _is_right(plan: Plan, chain: Chain) -> bool:
    try:
        verify(compile_program(plan, chain), chain)
    except InvalidProgram:
        return False
    return True


def _random_schedule(chain: Chain, tensor: Tensor, clip: bool, chance: random.Random) -> TensorSchedule:
    """Away after forward, after backward, or both. Often wrong."""
    block = chain.users()[tensor.name][0]
    backward, last = backward_stage(chain, block), 2 * len(chain.blocks) - 2
    sides = [Side.CPU, Side.GPU] if tensor.trainable else [Side.NOBODY]
    side = chance.choice(sides)
    update = backward if side is Side.GPU else chance.choice([*range(backward, last + 1), *range(block)])
    if clip and side is not Side.NOBODY:  # before the last stage a CPU update runs ahead of the norm
        update = last if side is Side.GPU else chance.choice((last, *range(backward, last)))
    out = chance.randint(update if side is Side.GPU else backward, last)
    after = Absence(evict=out, prefetch=chance.randint(0, block), offload=out if side is Side.GPU else None)
    absences = [after] if block or side is not Side.CPU else []
    if backward - block > 1 and chance.random() < 0.8:
        leave = chance.randint(block, backward - 2)
        absences.insert(0, Absence(evict=leave, prefetch=chance.randint(leave + 1, backward)))
    if side is not Side.CPU:
        states = Absence(evict=out, prefetch=chance.randint(0, update), offload=out) if side is Side.GPU else None
        states_away = (states,) if states and chance.random() < 0.7 else ()
        return TensorSchedule(tensor=tensor, side=side, update=update, weight=tuple(absences), states=states_away)
    send = chance.randint(backward, last)
    return TensorSchedule(
        tensor=tensor, side=side, update=update, send=send, drop=chance.randint(send, last), weight=tuple(absences)
    )
