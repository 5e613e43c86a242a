"""Items: the names that plans and programs give to the weights, gradients, states and activations they move."""

from __future__ import annotations

WEIGHT, GRADIENT, STATES, ACTIVATIONS = "w", "g", "s", "a"
"""Kinds of items."""


class Item(str):
    """One item: a text, the same in plans, programs, logs and files, with properties for its parts.

    weight        "w:NAME": the working copy of the tensor NAME
    gradient      "g:NAME"
    states        "s:NAME": the optimizer states, the master included; "s:NAME#3": piece 3 of them
    activations   "a:3.1": what block 3 offloads of slice 1
    """

    __slots__ = ()

    @classmethod
    def of(cls, kind: str, name: str) -> Item:
        """The item of this kind of a tensor."""
        return cls(f"{kind}:{name}")

    @classmethod
    def weight(cls, name: str) -> Item:
        """The working copy of a tensor."""
        return cls(f"w:{name}")

    @classmethod
    def gradient(cls, name: str) -> Item:
        """The gradient of a tensor."""
        return cls(f"g:{name}")

    @classmethod
    def states(cls, name: str, piece: int | None = None) -> Item:
        """The optimizer states of a tensor, or one piece of them."""
        return cls(f"s:{name}" if piece is None else f"s:{name}#{piece}")

    @classmethod
    def activations(cls, block: int, k: int) -> Item:
        """What a block offloads of slice `k`."""
        return cls(f"a:{block}.{k}")

    @property
    def kind(self) -> str:
        """WEIGHT, GRADIENT, STATES or ACTIVATIONS."""
        return self[0]

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self[2:].partition("#")[0]

    @property
    def piece(self) -> int | None:
        """Which piece of the states it is; None: all of them."""
        number = self.partition("#")[2]
        return int(number) if number else None

    @property
    def turn(self) -> tuple[int, int]:
        """Block and slice of activations."""
        block, _, k = self[2:].partition(".")
        return int(block), int(k)
