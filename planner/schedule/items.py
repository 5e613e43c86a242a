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

    __slots__ = ("kind", "name")

    kind: str
    """WEIGHT, GRADIENT, STATES or ACTIVATIONS."""
    name: str
    """The name of the tensor."""

    def __new__(cls, text: str = "") -> Item:
        """The item that is written so."""
        item = super().__new__(cls, text)
        item.kind, item.name = text[:1], text[2:].partition("#")[0]
        return item

    @staticmethod
    def of(kind: str, name: str) -> Item:
        """The item of this kind of a tensor."""
        return _OF_TENSORS[kind][name]

    @staticmethod
    def weight(name: str) -> Item:
        """The working copy of a tensor."""
        return _WEIGHTS[name]

    @staticmethod
    def gradient(name: str) -> Item:
        """The gradient of a tensor."""
        return _GRADIENTS[name]

    @staticmethod
    def states(name: str, piece: int | None = None) -> Item:
        """The optimizer states of a tensor, or one piece of them."""
        return _STATES[name] if piece is None else Item(f"{STATES}:{name}#{piece}")

    @staticmethod
    def activations(block: int, k: int) -> Item:
        """What a block offloads of slice `k`."""
        return Item(f"{ACTIVATIONS}:{block}.{k}")

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


class _Made(dict[str, Item]):
    """The items of one kind by the name of their tensor. Each is made once: a search asks for it a million times."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __missing__(self, name: str) -> Item:
        item = self[name] = Item(f"{self._kind}:{name}")
        return item


_WEIGHTS, _GRADIENTS, _STATES = _Made(WEIGHT), _Made(GRADIENT), _Made(STATES)
_OF_TENSORS = {WEIGHT: _WEIGHTS, GRADIENT: _GRADIENTS, STATES: _STATES}
