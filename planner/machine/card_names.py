"""Finds the card that a name stands for, as people, nvidia-smi and PyTorch write it: `4090`, `rtx-4060ti 8GB`,
`a100-80`, `NVIDIA GeForce RTX 3080 Laptop GPU`."""

from __future__ import annotations

import difflib
import re

from planner.errors import Exit, UserError
from planner.machine.cards import CARDS, Card

_SIZE = re.compile(r"\b([0-9]{1,3}) ?gi?b\b")
_SAYS_NOTHING = re.compile(
    r"nvidia|geforce|rtx|tesla|gpu|generation|blackwell|workstation|edition|sxm[0-9]?|hbm[0-9]e?"
)
_LAPTOP = re.compile(r"mobile|(?<=[0-9]{4})m$|(?<=[0-9]{4}ti)m$")
_MOST_NEAR, _ALIKE = 3, 0.6


def find_card(name: str) -> str | None:
    """The short name (a key of `CARDS`) of the card that `name` stands for; None if it stands for no card, or for
    several, as `RTX 6000` does."""
    return _SPELLINGS.get(_plain(name))


def card_named(name: str) -> str:
    """The short name (a key of `CARDS`) of the card that `name` stands for. Raises UserError (exit code 2), which names
    the nearest cards."""
    if (found := find_card(name)) is not None:
        return found
    near = [f"{card} ({_gigabytes(CARDS[card])} GB)" for card in _nearest(name)]
    meant = f"did you mean {' or '.join([', '.join(near[:-1]), near[-1]] if near[1:] else near)}? " if near else ""
    raise UserError(
        f"There is no hardware called {name}.",
        code="unknown-hardware",
        hint=f"{meant}offmate plan --hardware list shows all cards; a file describes any other machine",
        exit_code=Exit.USAGE,
    )


def _plain(name: str) -> str:
    """`name` in the form in which spellings are compared: small letters and digits, the memory's size at the end."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower())
    sizes = "".join(f"{size}gb" for size in _SIZE.findall(words))
    joined = _SAYS_NOTHING.sub("", _SIZE.sub("", words).replace(" ", ""))
    return _LAPTOP.sub("laptop", joined) + sizes


def _gigabytes(card: Card) -> int:
    """The memory as the card's name has it: an H200, sold with "141 GB", has 140 GiB."""
    size = re.search(r"([0-9]+) GB$", card.name)
    return int(size[1]) if size else card.memory_bytes // 2**30


def _spellings(name: str) -> tuple[str, ...]:
    """The plain forms of all names of the card with the short name `name`: without its memory's size, unless that tells
    it from others, and with it."""
    size = _gigabytes(CARDS[name])
    base = _plain(name).removesuffix(f"{size}gb")
    sized = (f"{base}{size}", f"{base}{size}gb")
    return sized if _plain(name) in sized else (base, *sized)


_SPELLINGS = {spelling: name for name in CARDS for spelling in _spellings(name)}


def _nearest(name: str) -> list[str]:
    """The short names of the cards that `name` may mean: those with the same number, then those spelt alike."""
    wanted, numbers = _plain(name), _numbers(name)
    likeness = {card: difflib.SequenceMatcher(None, wanted, _plain(card)).ratio() for card in CARDS}
    same = {card for card in CARDS if numbers & _numbers(card)}
    alike = [card for card in CARDS if card in same or likeness[card] >= _ALIKE]
    return sorted(alike, key=lambda card: (card not in same, -likeness[card]))[:_MOST_NEAR]


def _numbers(name: str) -> set[str]:
    """The numbers in a card's name, without its memory's size: 3080 of "rtx3080-12gb"."""
    return set(re.findall("[0-9]{2,}", _SIZE.sub("", name.lower())))
