"""Collects what a plan decides for each block and tensor, for the table on the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from planner.schedule.chain import Chain, Option, Tensor
from planner.schedule.compile import OpKind, order_program
from planner.schedule.items import GRADIENT, STATES, WEIGHT, Item
from planner.schedule.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A time in which a weight or its optimizer states are away from the device. `leaves`, `returns`: the stages
    (forward or backward of a block) after which they leave and for which they return. `next_step`: they return in the
    next step."""

    leaves: str
    returns: str
    next_step: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDecision:
    """What the plan decides for one tensor in a training step. `updated`: which side does its optimizer step, "gpu",
    "cpu", or "" for a frozen tensor. `update_stage`: the stage in which that is done. `sent`: the stage in which its
    gradient leaves the device. `stored`: its optimizer states are on disk. `trails`: these are updated only in the
    next step."""

    name: str
    elements: int
    bytes: int
    state_bytes: int
    gradient_bytes: int
    weight_absences: tuple[Absence, ...]
    state_absences: tuple[Absence, ...]
    updated: str
    update_stage: str
    sent: str
    stored: bool
    trails: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDecision:
    """What the plan decides for one block in a training step. `option` names the way to treat its activations,
    `treatment` says it in words. Of its weights, `resident_bytes` never leave the device, `away_once_bytes` are away
    once, between forward and backward or the reverse, and `away_twice_bytes` are copied for each pass. `up_bytes` and
    `down_bytes` are all bytes copied to and from the device in a step. A tensor that several blocks share counts with
    the first of them."""

    name: str
    kind: str
    option: str
    treatment: str
    forward_s: float
    backward_s: float
    saved_bytes: int
    offloaded_bytes: int
    resident_bytes: int
    away_once_bytes: int
    away_twice_bytes: int
    up_bytes: int
    down_bytes: int
    parameters: int
    cpu_parameters: int
    gpu_parameters: int
    tensors: tuple[TensorDecision, ...]


_ALL = {
    "keep": "keeps its activations on the GPU",
    "recompute": "computes its activations again in backward",
    "offload": "sends its activations to the host until backward",
    "offload-input": "sends its input to the host and computes its activations again from it",
    "offload-all": "sends its activations and its input to the host until backward",
    "eager": "runs its own code, once more in backward",
}
_PART = {
    "keep": "keeps {} on the GPU",
    "offload": "sends {} to the host until backward",
    "offload-input": "keeps {} on the GPU, sends its input to the host",
    "offload-all": "sends {} and its input to the host until backward",
}


def treatment(option: Option) -> str:
    """What `option` does with a block's activations, in words. If it saves a set of values, the words name the
    operations that compute them (`planner.graph.front`)."""
    return _treatment(option) + (", and on to disk" if option.on_disk else "")


def _treatment(option: Option) -> str:
    word, _, nodes = option.recipe.partition(" ")
    if not nodes:
        return _ALL.get(word, word)
    if nodes == "all":
        return _PART[word].format("all its activations")
    counts = Counter(re.sub(r"_\d+$", "", node).strip("_") for node in nodes.split(" "))
    results = ", ".join(f"{name} (×{count})" if count > 1 else name for name, count in sorted(counts.items()))
    return f"{_PART[word].format(f'the results of {results}')}, computes the rest again"


def decisions(plan: Plan, chain: Chain) -> tuple[BlockDecision, ...]:
    """What the plan decides for each block, in the order of the blocks."""
    reader = _Reader(plan, chain)
    return tuple(reader.block(index) for index in range(len(chain.blocks)))


class _Reader:
    def __init__(self, plan: Plan, chain: Chain) -> None:
        self.plan, self.chain, self.users = plan, chain, chain.users()
        self.names, self.trailing = [stage.name for stage in plan.stages], plan.trailing()
        self.moves: dict[tuple[str, str], list[int]] = {}
        for number, stage in enumerate(plan.stages):
            for word in ("prefetch", "offload", "evict", "cpu_update", "gpu_update"):
                for item in getattr(stage, word):
                    self.moves.setdefault((word, item), []).append(number)
        self.copied: Counter[tuple[OpKind, str]] = Counter()
        for op in order_program(plan, chain).ops:
            if op.kind in (OpKind.FETCH, OpKind.SEND):
                self.copied[op.kind, op.subject] += op.bytes

    def block(self, index: int) -> BlockDecision:
        block, name, slices = self.chain.blocks[index], self.plan.options[index], self.plan.slices
        option = block.option(name)
        tensors = [t for t in block.tensors if self.users[t.name][0] == index]
        decisions = [self.tensor(t) for t in tensors]
        offloaded, rounds = slices * option.offloaded_bytes, self.plan.rounds
        saved = option.saved_bytes + (block.input_bytes if option.reads_input else 0)
        last = index == len(self.chain.blocks) - 1

        def weights(absences: Sequence[int]) -> int:
            return sum(t.bytes for t, d in zip(tensors, decisions, strict=True) if len(d.weight_absences) in absences)

        def updated(by: str) -> int:
            return sum(d.elements for d in decisions if d.updated == by)

        return BlockDecision(
            name=block.name,
            kind=block.kind,
            option=name,
            treatment=treatment(option),
            forward_s=rounds * slices * option.forward_s,
            backward_s=rounds * slices * option.backward_s,
            saved_bytes=0 if last else slices * saved,
            offloaded_bytes=offloaded,
            resident_bytes=weights((0,)),
            away_once_bytes=weights((1,)),
            away_twice_bytes=weights(range(2, 9)),
            up_bytes=rounds * offloaded + self._moved(tensors, OpKind.FETCH),
            down_bytes=rounds * offloaded + self._moved(tensors, OpKind.SEND),
            parameters=sum(t.elements for t in tensors),
            cpu_parameters=updated("cpu"),
            gpu_parameters=updated("gpu"),
            tensors=tuple(decisions),
        )

    def tensor(self, tensor: Tensor) -> TensorDecision:
        name = tensor.name
        on_cpu, on_gpu = self._stages("cpu_update", name), self._stages("gpu_update", name)
        return TensorDecision(
            name=name,
            elements=tensor.elements,
            bytes=tensor.bytes,
            state_bytes=tensor.state_bytes,
            gradient_bytes=tensor.gradient_bytes,
            weight_absences=self._absences(Item.weight(name)),
            state_absences=self._absences(Item.states(name)),
            updated="cpu" if on_cpu else "gpu" if on_gpu else "",
            update_stage=next(iter((*on_cpu, *on_gpu)), ""),
            sent=next(iter(self._stages("offload", Item.gradient(name))), ""),
            stored=bool(on_cpu) and tensor.states_on_disk,
            trails=name in self.trailing,
        )

    def _stages(self, word: str, item: str) -> list[str]:
        return [self.names[number] for number in self.moves.get((word, item), ())]

    def _absences(self, item: Item) -> tuple[Absence, ...]:
        """The times in which an item is away: each release with the next fetch, which may be in the next step."""
        back = self.moves.get(("prefetch", item), [])
        absences = []
        for departure in self.moves.get(("evict", item), []):
            later = [number for number in back if number > departure]
            returns = later[0] if later else back[0]
            absences.append(Absence(leaves=self.names[departure], returns=self.names[returns], next_step=not later))
        return tuple(absences)

    def _moved(self, tensors: Sequence[Tensor], kind: OpKind) -> int:
        items = (Item.of(sort, tensor.name) for tensor in tensors for sort in (WEIGHT, GRADIENT, STATES))
        return sum(self.copied[kind, item] for item in items)
