"""What a seed stands for: a model's blocks and frame, its batches, its optimizer, and the budget it trains within."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.support.operations import OWN_CODE, TRACED

FEATURES = {
    # of the embedding and the head
    "two tables": 0.2,  # tokens and positions
    "head bias": 0.3,
    "tied": 0.35,
    "softcap": 0.2,
    # of the layers
    "two classes": 0.25,  # layers of two classes take turns, if there are enough
    "varied": 0.2,  # layers of one pattern are not of one kind
    "shared weight": 0.1,  # by two layers
    "again": 0.06,  # all layers run twice
    "second result": 0.2,  # which the loss reads
    "named results": 0.1,  # a dict
    "layers mask": 0.3,  # they are given the mask
    "layers first": 0.04,  # and what the embedding made
    "layers first, detached": 0.04,
    "layers tables": 0.1,  # and a tuple of two tables that the frame makes of its own parameters
    # of the frame
    "positions": 0.2,  # a parameter that is added
    "final norm": 0.5,
    "own scale": 0.15,  # a parameter that each layer's result is multiplied by
    "dropout": 0.3,
    "factor": 0.2,
    "noise": 0.15,
    "residual": 0.03,
    "turned": 0.1,  # layers have rows and positions the other way round
    "wide": 0.1,  # between layers numbers are fp32
    "autocast": 0.06,
    "z loss": 0.15,
    "hidden states": 0.2,  # are given back
    # of the data and the loop
    "masked": 0.4,
    "weighted": 0.15,  # tokens have weights in the loss
    "short": 0.4,  # a step of short batches among the others
    "evaluates": 0.2,
    "saves": 0.15,  # and takes up what it saved
}
"""What a model or its training has, and how often."""

FROZEN = ("",) * 7 + ("embedding", "below", "middle", "head", "all but biases")
CLIPS = (None, None, 0.05, 0.5, 1.0, 5.0, 1e6)
SHARES = (0.0, 0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and how it is trained.

    patterns    names of operations (tests.support.operations), of layers that take turns
    features    of those above
    frozen      what is not trained
    slices      micro-batches a step
    share       of what lies between the least budget and all the memory that helps; None: a plan of random journeys
    shape       rows and length of a batch
    """

    seed: int
    width: int
    vocabulary: int
    layers: int
    patterns: tuple[tuple[str, ...], ...]
    features: frozenset[str]
    frozen: str
    bf16: bool
    slices: int
    clip: float | None
    share: float | None
    shape: tuple[int, int]
    groups: int
    steps: int = 3


def case_of(seed: int) -> Case:
    """The same for the same seed, on every machine."""
    chance = random.Random(seed)

    def pattern() -> tuple[str, ...]:
        found = [chance.choice(list(TRACED)) for _ in range(chance.choice((0, 1, 1, 2)))]
        if chance.random() < 0.2:
            found.insert(chance.randint(0, len(found)), chance.choice(list(OWN_CODE)))
        return tuple(found)

    return Case(
        seed=seed,
        width=chance.choice((8, 16, 24, 32)),
        vocabulary=chance.choice((40, 64, 150)),
        layers=chance.choice((2, 2, 3, 4)),
        patterns=tuple(pattern() for _ in range(chance.choice((1, 1, 1, 2)))),
        features=frozenset(name for name, often in FEATURES.items() if chance.random() < often),
        frozen=chance.choice(FROZEN),
        bf16=chance.random() < 0.33,
        slices=chance.choice((1, 1, 2, 3)),
        clip=chance.choice(CLIPS),
        share=None if chance.random() < 0.5 else chance.choice(SHARES),
        shape=(chance.choice((1, 2, 3)), chance.choice((8, 12, 16, 24))),
        groups=chance.choice((1, 2, 3)),
    )
