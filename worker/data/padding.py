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

Piece = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Token ids [tokens], and whether each is learned [tokens]."""
IGNORED = -100
"""The label of a token that is not learned, as in transformers' losses."""


_SHORTEST = 64
"""The least length of a slice, in tokens: a shorter one would take hardly less time."""


def buckets(max_length: int) -> tuple[int, ...]:
    """The lengths, in tokens, to which the rows of a slice (micro-batch) may be padded, shortest first: `max_length`,
    three quarters, a half, three eighths and a quarter of it, and so on down to `_SHORTEST`. They are few, because code
    and places in memory are made for each length. They are close enough that less than a third of a slice with one row
    is padding."""
    lengths: set[int] = set()
    part = 1
    while part <= 4 or max_length >= _SHORTEST * part:
        lengths |= {-(-max_length // part), -(-3 * max_length // (2 * part)) if part > 1 else max_length}
        part *= 2
    return tuple(sorted(lengths))


def width(batch: Mapping[str, Tensor]) -> int:
    """The length of a batch's rows in `input_ids` plus that in `labels`, in tokens, padding included."""
    return int(batch["input_ids"].shape[1] + batch["labels"].shape[1])


def num_items(batch: Mapping[str, Tensor]) -> int:
    """The number of items over which a batch's loss is the mean: the labels that are predicted from the token before
    them."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Which tokens of a corpus each row holds. A piece is a run of tokens that stays together, mostly a document.
    `pieces` [pieces, 2]: the index of each piece's first token in the corpus, and its length in tokens. Row r holds the
    pieces from `ends[r - 1]` (or 0) to `ends[r]`. `isolated`: the pieces of a row do not see each other in
    attention."""

    pieces: NDArray[np.int64]
    ends: NDArray[np.int64]
    isolated: bool = False

    @classmethod
    def single(cls, pieces: NDArray[np.int64]) -> Layout:
        """A layout in which each of `pieces` [pieces, 2] (first token, length) is a row of its own."""
        return cls(pieces=pieces, ends=np.arange(1, len(pieces) + 1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each row, without padding: an array [rows]."""
        return np.diff(np.concatenate((np.zeros(1, np.int64), np.cumsum(self.pieces[:, 1])))[np.r_[0, self.ends]])

    def of(self, row: int) -> NDArray[np.int64]:
        """The pieces of row number `row`: an array [pieces, 2] of first token and length."""
        return self.pieces[self.ends[row - 1] if row else 0 : self.ends[row]]

    def chosen(self, which: NDArray[np.bool_]) -> Layout:
        """A layout of only those rows for which the boolean array `which` [rows] is True."""
        counts = np.diff(np.r_[0, self.ends])
        return replace(self, pieces=self.pieces[np.repeat(which, counts)], ends=np.cumsum(counts[which]))

    def content(self) -> bytes:
        """Bytes that are equal for equal layouts and differ for others, to compute a fingerprint from."""
        return self.pieces.tobytes() + (self.ends.tobytes() if self.isolated else b"")


class Rows:
    """The rows of a corpus, and batches of them. `masked`: batches have an attention mask, which says what is padding.
    `by_document`: the loss is a mean over documents. `end`: a token id that is learned after each answer that something
    follows, in place of the next token (LLaMA-Factory's `efficient_eos`). `border`: rows up to this many tokens are not
    padded beyond it."""

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
        """A copy with only those rows for which the boolean array `which` [rows] is True."""
        return self.laid_out(self.layout.chosen(which))

    def laid_out(self, layout: Layout) -> Rows:
        """A copy with the same corpus and settings, but rows by another `layout`."""
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

    def pieces(self, number: int) -> Iterator[Piece]:
        """Yield (token ids [tokens], learned [tokens]) for each piece, mostly a document, of row number `number`."""
        for start, length in self.layout.of(number):
            yield self.corpus.tokens[start : start + length], self.corpus.trained[start : start + length]

    def sequences(self, numbers: NDArray[np.int64]) -> list[list[Piece]]:
        """What stands in each line of the batch of the rows with these `numbers`, piece by piece."""
        return [list(self.pieces(int(number))) for number in numbers]

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The number of tokens of each row, [rows]."""
        return self.lengths

    @property
    def every(self) -> NDArray[np.int64]:
        """The number of tokens of each line of a batch, [lines]; a row is a line, but for pairs of preferences."""
        return self.lengths

    def titles(self, number: int) -> tuple[str, ...]:
        """What each of the `pieces` of row number `number` is, in a word; empty where all are alike."""
        return ()

    @property
    def scored(self) -> NDArray[np.int64]:
        """The pieces that are learned from, [pieces, 2] (first token, length), in the order of the corpus."""
        pieces = self.layout.pieces
        return pieces[np.argsort(pieces[:, 0])]

    def longest_first(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row numbers `numbers`, sorted by the length of their rows, longest first."""
        return numbers[np.argsort(-self.lengths[numbers], kind="stable")]

    def padded(self, longest: int) -> int:
        """The length to which the rows of a slice (micro-batch) are padded if its longest row has `longest` tokens."""
        length = next(bucket for bucket in buckets(self._max_length) if bucket >= longest)
        return length if self.border is None or longest > self.border else min(length, self.border)

    @property
    def most(self) -> tuple[int, int]:
        """(length of `input_ids`, length of `labels`), in tokens and with padding, of a slice that contains the longest
        row."""
        length = self.padded(int(self.lengths.max()))
        return length, length

    def batch(self, numbers: NDArray[np.int64]) -> dict[str, Tensor]:
        """The rows with these `numbers` as a batch: `input_ids` and `labels`, int64 [rows, length], padded on the right
        to one of the `buckets`. Where pieces (documents packed into one row) are isolated there are also
        `position_ids`, which restart with every piece and with the padding: by them transformers' models keep attention
        within a piece. The first token of an isolated piece is then not learned, because nothing stands before it.
        Where the rows are masked there is also an `attention_mask`."""
        sequences = self.sequences(numbers)
        lengths = np.array([sum(len(tokens) for tokens, _ in pieces) for pieces in sequences])
        period = length = self.padded(int(lengths.max()))
        if self.border is not None:
            # In packed rows positions restart with each document; those of the padding must not be larger.
            period = max(len(tokens) for pieces in sequences for tokens, _ in pieces)
        ids = np.full((len(sequences), length), self.pad, np.int64)
        labels = np.full((len(sequences), length), IGNORED, np.int64)
        positions = np.zeros((len(sequences), length), np.int64)
        for place, pieces in enumerate(sequences):
            at = 0
            for tokens, trained in pieces:
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
            is_token = np.arange(length) < lengths[:, None]
            tensors["attention_mask"] = torch.from_numpy(is_token.astype(np.int64))
        return {**tensors, "position_ids": torch.from_numpy(positions)} if self.layout.isolated else tensors

    def learned(self, batch: dict[str, Tensor]) -> int:
        """The number of a batch's labels that are to be predicted, that is, not -100."""
        return num_items(batch)

    def num_items(self, batch: dict[str, Tensor]) -> int:
        """The number of items over which a batch's loss is the mean: labels to be predicted or, with `by_document`,
        documents that have some."""
        return _documents(batch) if self.by_document else self.learned(batch)


def _documents(batch: Mapping[str, Tensor]) -> int:
    """The number of a batch's documents that have a token to be predicted."""
    rows, places = torch.nonzero(batch["labels"][:, 1:] != IGNORED, as_tuple=True)
    if "position_ids" not in batch:
        return len(set(rows.tolist()))
    number = (batch["position_ids"] == 0).flatten().cumsum(0).view(batch["labels"].shape)
    return len(set(number[rows, places + 1].tolist()))


class EvalBatches:
    """The batches of an evaluation: all of `rows`, the longest first, `size` rows in each batch."""

    def __init__(self, rows: Rows, size: int) -> None:
        self.rows = rows
        order = rows.longest_first(np.arange(len(rows)))
        self._numbers = [order[start : start + size] for start in range(0, len(order), size)]
        log.info("data: %s, %s to evaluate on", counted(len(rows), "row"), counted(int(rows.tokens.sum()), "token"))

    def __len__(self) -> int:
        return len(self._numbers)

    def batch(self, number: int) -> dict[str, Tensor]:
        """Batch number `number` (from 0): the tensors that `Rows.batch` makes, and `num_items_in_batch`, the number of
        items over which its loss is the mean."""
        batch = self.rows.batch(self._numbers[number])
        return {**batch, "num_items_in_batch": torch.tensor(self.rows.num_items(batch))}

    def learned(self, batch: dict[str, Tensor]) -> int:
        """The number of a batch's labels that are to be predicted, that is, not -100."""
        return self.rows.learned(batch)
