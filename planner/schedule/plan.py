"""Defines the plan: all decisions about a training step, for whole tensors. It is an immutable value. Each stage has a
text form of one line:

    B3 prefetch=w:l2.up,s:l2.up offload=g:l3.up evict=w:l3.up,g:l3.up cpu=l3.up gpu=l3.norm states=l2.down
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planner.schedule.items import Item


class Direction(StrEnum):
    """The direction of a stage: FORWARD or BACKWARD of a block; HEAD is the head with its loss, both directions in one
    stage."""

    FORWARD = "F"
    HEAD = "H"
    BACKWARD = "B"


_FIELDS = {
    "prefetch": "prefetch",
    "offload": "offload",
    "evict": "evict",
    "cpu": "cpu_update",
    "gpu": "gpu_update",
    "states": "states_update",
}
_OF_ITEMS = frozenset(("prefetch", "offload", "evict"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One block's forward or backward on all slices (micro-batches) of a round, with the transfers and updates beside
    it.

    prefetch    items whose device copy is allocated at the stage's start and filled during it (from the host); the
                stage waits for those that it reads itself
    offload     items copied to the host during the stage; an item that the stage itself completes, at its end
    evict       items whose device copy is released at the stage's end (after their copies are done)
    cpu_update  tensors that the CPU updates during the stage, after their gradients have come to the host; with
                clipping, an update before the last stage does not wait for the gradient norm, and is done again if
                the norm clips
    gpu_update  tensors updated on the GPU at the stage's end
    states_update  tensors whose optimizer states on disk are updated one step after their weight: with clipping, the
                CPU computes the new weight after the last stage, when the norm is known, and leaves the states as
                they are; the states are updated in the next step, from this stage's start on, before the tensor's
                next gradient comes

    All rounds of a step have the same stages, with two exceptions. Updates, transfers of states and copies of updated
    weights belong to the last round (if they are listed before the update's stage, to the first round of the next
    step). Gradients come back to the device from the second round on. In the last round, a gradient that the device's
    update needs is neither sent nor released before the update.
    """

    block: int
    direction: Direction
    prefetch: tuple[Item, ...] = ()
    offload: tuple[Item, ...] = ()
    evict: tuple[Item, ...] = ()
    cpu_update: tuple[str, ...] = ()
    gpu_update: tuple[str, ...] = ()
    states_update: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Direction and block of the stage, such as "F3"."""
        return f"{self.direction}{self.block}"

    def __str__(self) -> str:
        parts = [f"{word}={','.join(getattr(self, field))}" for word, field in _FIELDS.items() if getattr(self, field)]
        return " ".join([self.name, *parts])

    @classmethod
    def parse(cls, text: str) -> Stage:
        """The stage that `text` describes: `Stage.parse(str(stage)) == stage`. Raises ValueError."""
        head, *parts = text.split()
        lists: dict[str, Any] = {}
        for part in parts:
            word, _, items = part.partition("=")
            if word not in _FIELDS or not items:
                raise ValueError(f"not a part of a stage: {part!r} in {text!r}")
            field = _FIELDS[word]
            lists[field] = tuple(map(Item if field in _OF_ITEMS else str, items.split(",")))
        return cls(block=int(head[1:]), direction=Direction(head[0]), **lists)


def stage_order(blocks: int) -> tuple[tuple[Direction, int], ...]:
    """The (direction, block) of each stage in a cycle over n = `blocks` blocks: F0 … F(n-2), H(n-1), B(n-2) … B0."""
    last = blocks - 1
    return (
        *((Direction.FORWARD, i) for i in range(last)),
        (Direction.HEAD, last),
        *((Direction.BACKWARD, i) for i in reversed(range(last))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a training step does, as data. A step has `rounds` × `slices` micro-batches.

    `options[i]`: the name of block i's `Option`. `resident`: the items on the device when a step begins. `clip`:
    updates depend on the global norm of the gradients. `copy_turns`: for how many turns (one block's run on one slice)
    offloaded activations are copied, at least 1 (`planner.schedule.activation_turns`). `offsets`: byte offsets of
    tensors in the device's memory, in the order of `planner.schedule.places.Spans`; empty if tensors have no fixed
    places. `step_s`: seconds of the simulated step. `lp_step_s`: the solver's objective before rounding, in seconds.
    `bound_s`: a lower bound in seconds for any schedule. `solver_gap`: the solver's own gap (0.01 = 1%). `source`: the
    method that proposed the chosen candidate.
    """

    stages: tuple[Stage, ...]
    options: tuple[str, ...]
    resident: tuple[Item, ...]
    slices: int = 1
    rounds: int = 1
    clip: bool = False
    copy_turns: int = 1
    step_s: float = 0.0
    lp_step_s: float = 0.0
    bound_s: float = 0.0
    solver_gap: float = 0.0
    gpu_peak_bytes: int = 0
    cpu_peak_bytes: int = 0
    gpu_budget_bytes: int = 0
    cpu_budget_bytes: int = 0
    source: str = ""
    offsets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if tuple((s.direction, s.block) for s in self.stages) != stage_order(len(self.options)):
            raise ValueError(f"{len(self.options)} blocks have stages F0 … H … B0, got {[s.name for s in self.stages]}")
        if min(self.slices, self.rounds, self.copy_turns) < 1:
            counts = f"{self.rounds} × {self.slices}, copied for {self.copy_turns} turns"
            raise ValueError(f"rounds × slices are {counts}; each is at least 1")

    def ahead(self) -> frozenset[str]:
        """Names of the tensors that the CPU updates before the gradient norm is known: with clipping, all those that it
        updates before the last stage. Empty without clipping."""
        return frozenset(name for stage in self.stages[:-1] for name in stage.cpu_update) if self.clip else frozenset()

    def trailing(self) -> frozenset[str]:
        """Names of the tensors whose optimizer states on disk are updated one step after their weight."""
        return frozenset(name for stage in self.stages for name in stage.states_update)

    def cpu_updated(self) -> frozenset[str]:
        """Names of the tensors that the CPU updates."""
        return frozenset(name for stage in self.stages for name in stage.cpu_update)
