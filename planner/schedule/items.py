"""Defines items: the names under which plans and programs move weights, gradients, optimizer states and activations."""

from __future__ import annotations

WEIGHT, GRADIENT, STATES, ACTIVATIONS = "w", "g", "s", "a"
"""The four kinds of items, as the first letter of an item's text."""


class Item(str):
    """What a plan moves between host and device, written as a text. The text is the same in plans, programs, logs and
    files.

    weight        "w:NAME": the working copy of the tensor NAME
    gradient      "g:NAME"
    states        "s:NAME": its optimizer states, the fp32 master included; "s:NAME#3": piece 3 of them, if on disk
    activations   "a:3.1": what block 3 offloads of slice (micro-batch) 1
    """

    __slots__ = ("kind", "name")

    kind: str
    """WEIGHT, GRADIENT, STATES or ACTIVATIONS."""
    name: str
    """The name of the tensor; for activations, block and slice ("3.1")."""

    def __new__(cls, text: str = "") -> Item:
        """The item with this text, such as "w:l2.up"."""
        item = super().__new__(cls, text)
        item.kind, item.name = text[:1], text[2:].partition("#")[0]
        return item

    @staticmethod
    def of(kind: str, name: str) -> Item:
        """The weight, gradient or states of the tensor `name`; `kind` is WEIGHT, GRADIENT or STATES."""
        return _OF_TENSORS[kind][name]

    @staticmethod
    def weight(name: str) -> Item:
        """The item for the working copy of the tensor `name`."""
        return _WEIGHTS[name]

    @staticmethod
    def gradient(name: str) -> Item:
        """The item for the gradient of the tensor `name`."""
        return _GRADIENTS[name]

    @staticmethod
    def states(name: str, piece: int | None = None) -> Item:
        """The item for the optimizer states of the tensor `name`, or for one numbered piece of them."""
        return _STATES[name] if piece is None else Item(f"{STATES}:{name}#{piece}")

    @staticmethod
    def activations(block: int, k: int) -> Item:
        """The item for what block `block` offloads of slice (micro-batch) `k`."""
        return Item(f"{ACTIVATIONS}:{block}.{k}")

    @property
    def piece(self) -> int | None:
        """The number of the piece of optimizer states that this item is; None if it is all of them, or another kind of
        item."""
        number = self.partition("#")[2]
        return int(number) if number else None

    @property
    def turn(self) -> tuple[int, int]:
        """The indices (block, slice) of an activations item."""
        block, _, k = self[2:].partition(".")
        return int(block), int(k)


class _Made(dict[str, Item]):
    """The items of one kind by the name of their tensor. Each is made once, because a search asks for it a million
    times."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __missing__(self, name: str) -> Item:
        item = self[name] = Item(f"{self._kind}:{name}")
        return item


_WEIGHTS, _GRADIENTS, _STATES = _Made(WEIGHT), _Made(GRADIENT), _Made(STATES)
_OF_TENSORS = {WEIGHT: _WEIGHTS, GRADIENT: _GRADIENTS, STATES: _STATES}
