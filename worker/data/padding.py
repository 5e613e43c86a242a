"""Rows of tokens as batches: the longest first, padded on the right to one of a few lengths."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from planner.units import counted
from worker.data.corpus import Corpus

log = logging.getLogger(__name__)

IGNORED = -100
"""Label of a token that is not learned, as transformers' losses have it."""


_SHORTEST = 64
"""Tokens below which a shorter slice takes hardly less time."""


def buckets(max_length: int) -> tuple[int, ...]:
    """The lengths that slices have, shortest first: all, three quarters and a half of `max_length`, three eighths and a
    quarter of it, and so on down to `_SHORTEST`. They are few, because code and places in memory are made anew for
    each, and so near to each other that less than a third of a slice with one row is padding."""
    found: set[int] = set()
    part = 1
    while part <= 4 or max_length >= _SHORTEST * part:
        found |= {-(-max_length // part), -(-3 * max_length // (2 * part)) if part > 1 else max_length}
        part *= 2
    return tuple(sorted(found))


def width(batch: Mapping[str, Tensor]) -> int:
    """Tokens of a batch's rows, padding included: of what is read and of what is predicted, together."""
    return int(batch["input_ids"].shape[1] + batch["labels"].shape[1])


def num_items(batch: Mapping[str, Tensor]) -> int:
    """Tokens of a batch that its loss is the mean over."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """What stands in the rows. `pieces` [pieces, 2]: first token of the corpus and length; row r is the pieces from
    `ends[r - 1]` (or 0) to `ends[r]`. `isolated`: no piece of a row sees another."""

    pieces: NDArray[np.int64]
    ends: NDArray[np.int64]
    isolated: bool = False

    @classmethod
    def single(cls, pieces: NDArray[np.int64]) -> Layout:
        """A row for every piece."""
        return cls(pieces=pieces, ends=np.arange(1, len(pieces) + 1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per row."""
        return np.diff(np.concatenate((np.zeros(1, np.int64), np.cumsum(self.pieces[:, 1])))[np.r_[0, self.ends]])

    def of(self, row: int) -> NDArray[np.int64]:
        """The pieces of a row."""
        return self.pieces[self.ends[row - 1] if row else 0 : self.ends[row]]

    def chosen(self, which: NDArray[np.bool_]) -> Layout:
        """Some of the rows."""
        counts = np.diff(np.r_[0, self.ends])
        return replace(self, pieces=self.pieces[np.repeat(which, counts)], ends=np.cumsum(counts[which]))

    def content(self) -> bytes:
        """What tells this layout from others."""
        return self.pieces.tobytes() + (self.ends.tobytes() if self.isolated else b"")


class Rows:
    """Rows of a corpus, and batches of them; `masked`: these say what of them is padding; `by_document`: their loss is
    a mean over documents; `end`: a token that is learned behind each answer that something follows, in place of what
    does (LLaMA-Factory's `efficient_eos`); `border`: padding brings no row beyond so many tokens."""

    def __init__(
        self, corpus: Corpus, layout: Layout, *, max_length: int, pad: int, masked: bool = False,
        by_document: bool = False, end: int | None = None, border: int | None = None,
    ) -> None:  # fmt: skip
        self.border = border
        self.corpus, self.layout, self.pad, self.masked, self.by_document = corpus, layout, pad, masked, by_document
        self.end = end
        self.lengths = layout.lengths
        self._max_length = max_length

    def __len__(self) -> int:
        return len(self.layout)

    def chosen(self, which: NDArray[np.bool_]) -> Rows:
        """Some of them."""
        return self.laid_out(self.layout.chosen(which))

    def laid_out(self, layout: Layout) -> Rows:
        """Other rows of the corpus."""
        return Rows(
            self.corpus, layout, max_length=self._max_length, pad=self.pad, masked=self.masked,
            by_document=self.by_document, end=self.end, border=self.border,
        )  # fmt: skip

    def pieces(self, number: int) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """The tokens of each piece of a row, and which of them are learned."""
        for start, length in self.layout.of(number):
            yield self.corpus.tokens[start : start + length], self.corpus.trained[start : start + length]

    def longest_first(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """`numbers` by the length of their rows."""
        return numbers[np.argsort(-self.lengths[numbers], kind="stable")]

    def padded(self, longest: int) -> int:
        """Tokens of the rows of a slice whose longest row has so many."""
        length = next(bucket for bucket in buckets(self._max_length) if bucket >= longest)
        return length if self.border is None or longest > self.border else min(length, self.border)

    @property
    def most(self) -> tuple[int, int]:
        """Tokens of a row in the largest slice there may be, of `input_ids` and of `labels`."""
        length = self.padded(int(self.lengths.max()))
        return length, length

    def batch(self, numbers: NDArray[np.int64]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, int64 [rows, length], padded on the right to one of the `buckets`. Where pieces are
        isolated also `position_ids`, which begin again with every piece and with the padding: by these transformers'
        models keep attention within a piece. A piece's first token is not learned, there is nothing before it. Where
        they are masked also `attention_mask`."""
        longest = int(self.lengths[numbers].max())
        period = length = self.padded(longest)
        if self.border is not None:
            # Of packed rows positions begin again with each document; those of padding must not be larger.
            period = max(len(tokens) for number in numbers for tokens, _ in self.pieces(number))
        ids = np.full((len(numbers), length), self.pad, np.int64)
        labels = np.full((len(numbers), length), IGNORED, np.int64)
        positions = np.zeros((len(numbers), length), np.int64)
        for place, number in enumerate(numbers):
            at = 0
            for tokens, trained in self.pieces(number):
                end = at + len(tokens)
                ids[place, at:end] = tokens
                labels[place, at:end] = np.where(trained, tokens, IGNORED)
                if self.end is not None:  # not behind an end that is there, as where a wrapped row goes on
                    behind = trained[:-1] & ~trained[1:] & (tokens[:-1] != self.end)
                    labels[place, at + 1 : end][behind] = self.end
                positions[place, at:end] = np.arange(len(tokens))
                if self.layout.isolated:
                    labels[place, at] = IGNORED
                at = end
            positions[place, at:] = np.arange(length - at) % period
        found = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self.masked:
            there = np.arange(length) < self.lengths[numbers, None]
            found["attention_mask"] = torch.from_numpy(there.astype(np.int64))
        return {**found, "position_ids": torch.from_numpy(positions)} if self.layout.isolated else found

    def learned(self, batch: dict[str, Tensor]) -> int:
        """Tokens of a batch that are to be predicted."""
        return num_items(batch)

    def num_items(self, batch: dict[str, Tensor]) -> int:
        """What of a batch its loss is the mean over: these tokens, or documents that have some."""
        return _documents(batch) if self.by_document else self.learned(batch)


def _documents(batch: Mapping[str, Tensor]) -> int:
    """Documents of a batch that have a token to be predicted."""
    rows, places = torch.nonzero(batch["labels"][:, 1:] != IGNORED, as_tuple=True)
    if "position_ids" not in batch:
        return len(set(rows.tolist()))
    number = (batch["position_ids"] == 0).flatten().cumsum(0).view(batch["labels"].shape)
    return len(set(number[rows, places + 1].tolist()))


class EvalBatches:
    """All `rows` of an evaluation, the longest first, in batches of `size` of them."""

    def __init__(self, rows: Rows, size: int) -> None:
        self.rows = rows
        order = rows.longest_first(np.arange(len(rows)))
        self._numbers = [order[start : start + size] for start in range(0, len(order), size)]
        log.info("data: %s, %s to evaluate on", counted(len(rows), "row"), counted(int(rows.lengths.sum()), "token"))

    def __len__(self) -> int:
        return len(self._numbers)

    def batch(self, number: int) -> dict[str, Tensor]:
        """`input_ids`, `labels`, and what the batch's loss is the mean over so many of."""
        batch = self.rows.batch(self._numbers[number])
        return {**batch, "num_items_in_batch": torch.tensor(self.rows.num_items(batch))}

    def learned(self, batch: dict[str, Tensor]) -> int:
        """Tokens of a batch that are to be predicted."""
        return self.rows.learned(batch)
