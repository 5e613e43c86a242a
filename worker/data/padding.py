"""Makes batches from rows of tokens: the longest rows first, padded on the right to one of a few lengths."""

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
"""The label of a token that is not learned, as in transformers' losses."""


_SHORTEST = 64
"""Below this many tokens a shorter slice takes hardly less time."""


def buckets(max_length: int) -> tuple[int, ...]:
    """The lengths that slices may have, shortest first: `max_length`, three quarters, a half, three eighths and a
    quarter of it, and so on down to `_SHORTEST`. They are few, because code and places in memory are made for each
    length. They are close enough that less than a third of a slice with one row is padding."""
    lengths: set[int] = set()
    part = 1
    while part <= 4 or max_length >= _SHORTEST * part:
        lengths |= {-(-max_length // part), -(-3 * max_length // (2 * part)) if part > 1 else max_length}
        part *= 2
    return tuple(sorted(lengths))


def width(batch: Mapping[str, Tensor]) -> int:
    """The sum of the row lengths of a batch's `input_ids` and `labels`, in tokens, padding included."""
    return int(batch["input_ids"].shape[1] + batch["labels"].shape[1])


def num_items(batch: Mapping[str, Tensor]) -> int:
    """The number of tokens over which a batch's loss is the mean."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Which tokens each row holds. `pieces` [pieces, 2]: the index of a piece's first token in the corpus, and its
    length; row r is the pieces from `ends[r - 1]` (or 0) to `ends[r]`. `isolated`: no piece of a row sees another."""

    pieces: NDArray[np.int64]
    ends: NDArray[np.int64]
    isolated: bool = False

    @classmethod
    def single(cls, pieces: NDArray[np.int64]) -> Layout:
        """The layout with one row for every piece."""
        return cls(pieces=pieces, ends=np.arange(1, len(pieces) + 1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each row."""
        return np.diff(np.concatenate((np.zeros(1, np.int64), np.cumsum(self.pieces[:, 1])))[np.r_[0, self.ends]])

    def of(self, row: int) -> NDArray[np.int64]:
        """The pieces of a row."""
        return self.pieces[self.ends[row - 1] if row else 0 : self.ends[row]]

    def chosen(self, which: NDArray[np.bool_]) -> Layout:
        """The layout of the rows that `which` selects."""
        counts = np.diff(np.r_[0, self.ends])
        return replace(self, pieces=self.pieces[np.repeat(which, counts)], ends=np.cumsum(counts[which]))

    def content(self) -> bytes:
        """Bytes that differ between different layouts, for a fingerprint."""
        return self.pieces.tobytes() + (self.ends.tobytes() if self.isolated else b"")


class Rows:
    """Rows of a corpus, and batches of them. `masked`: batches have an attention mask that says what is padding.
    `by_document`: the loss is a mean over documents. `end`: a token that is learned behind each answer that is followed
    by something, in place of the next token (LLaMA-Factory's `efficient_eos`). `border`: padding does not lengthen rows
    beyond this many tokens."""

    def __init__(
        self,
        corpus: Corpus,
        layout: Layout,
        *,
        max_length: int,
        pad: int,
        masked: bool = False,
        by_document: bool = False,
        end: int | None = None,
        border: int | None = None,
    ) -> None:
        self.border = border
        self.corpus, self.layout, self.pad, self.masked, self.by_document = corpus, layout, pad, masked, by_document
        self.end = end
        self.lengths = layout.lengths
        self._max_length = max_length

    def __len__(self) -> int:
        return len(self.layout)

    def chosen(self, which: NDArray[np.bool_]) -> Rows:
        """The rows that `which` selects."""
        return self.laid_out(self.layout.chosen(which))

    def laid_out(self, layout: Layout) -> Rows:
        """Rows of the same corpus with another layout."""
        return Rows(
            self.corpus,
            layout,
            max_length=self._max_length,
            pad=self.pad,
            masked=self.masked,
            by_document=self.by_document,
            end=self.end,
            border=self.border,
        )

    def pieces(self, number: int) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """The tokens of each piece of a row, and which of them are learned."""
        for start, length in self.layout.of(number):
            yield self.corpus.tokens[start : start + length], self.corpus.trained[start : start + length]

    def longest_first(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """`numbers`, sorted by the length of their rows, longest first."""
        return numbers[np.argsort(-self.lengths[numbers], kind="stable")]

    def padded(self, longest: int) -> int:
        """The row length of a slice, padding included, whose longest row has `longest` tokens."""
        length = next(bucket for bucket in buckets(self._max_length) if bucket >= longest)
        return length if self.border is None or longest > self.border else min(length, self.border)

    @property
    def most(self) -> tuple[int, int]:
        """The row lengths in tokens of the largest possible slice, of `input_ids` and of `labels`."""
        length = self.padded(int(self.lengths.max()))
        return length, length

    def batch(self, numbers: NDArray[np.int64]) -> dict[str, Tensor]:
        """The rows `numbers` as `input_ids` and `labels`, int64 [rows, length], padded on the right to one of the
        `buckets`. Where pieces are isolated there are also `position_ids`, which restart with every piece and with the
        padding: by them transformers' models keep attention within a piece. The first token of an isolated piece is
        then not learned, because nothing stands before it. Where the rows are masked there is also an
        `attention_mask`."""
        longest = int(self.lengths[numbers].max())
        period = length = self.padded(longest)
        if self.border is not None:
            # In packed rows positions restart with each document; those of the padding must not be larger.
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
                if self.end is not None:  # not where the end token is there already, as where a wrapped row goes on
                    behind = trained[:-1] & ~trained[1:] & (tokens[:-1] != self.end)
                    labels[place, at + 1 : end][behind] = self.end
                positions[place, at:end] = np.arange(len(tokens))
                if self.layout.isolated:
                    labels[place, at] = IGNORED
                at = end
            positions[place, at:] = np.arange(length - at) % period
        tensors = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self.masked:
            is_token = np.arange(length) < self.lengths[numbers, None]
            tensors["attention_mask"] = torch.from_numpy(is_token.astype(np.int64))
        return {**tensors, "position_ids": torch.from_numpy(positions)} if self.layout.isolated else tensors

    def learned(self, batch: dict[str, Tensor]) -> int:
        """The number of a batch's tokens that are to be predicted."""
        return num_items(batch)

    def num_items(self, batch: dict[str, Tensor]) -> int:
        """The number of items over which a batch's loss is the mean: learned tokens, or documents that have some."""
        return _documents(batch) if self.by_document else self.learned(batch)


def _documents(batch: Mapping[str, Tensor]) -> int:
    """The number of a batch's documents that have a token to be predicted."""
    rows, places = torch.nonzero(batch["labels"][:, 1:] != IGNORED, as_tuple=True)
    if "position_ids" not in batch:
        return len(set(rows.tolist()))
    number = (batch["position_ids"] == 0).flatten().cumsum(0).view(batch["labels"].shape)
    return len(set(number[rows, places + 1].tolist()))


class EvalBatches:
    """All `rows` of an evaluation, the longest first, in batches of `size` rows."""

    def __init__(self, rows: Rows, size: int) -> None:
        self.rows = rows
        order = rows.longest_first(np.arange(len(rows)))
        self._numbers = [order[start : start + size] for start in range(0, len(order), size)]
        log.info("data: %s, %s to evaluate on", counted(len(rows), "row"), counted(int(rows.lengths.sum()), "token"))

    def __len__(self) -> int:
        return len(self._numbers)

    def batch(self, number: int) -> dict[str, Tensor]:
        """Batch `number` as `Rows.batch`, with `num_items_in_batch`: the number of items its loss is the mean over."""
        batch = self.rows.batch(self._numbers[number])
        return {**batch, "num_items_in_batch": torch.tensor(self.rows.num_items(batch))}

    def learned(self, batch: dict[str, Tensor]) -> int:
        """The number of a batch's tokens that are to be predicted."""
        return self.rows.learned(batch)
