"""Rows of tokens as batches: the longest first, padded on the right to one of a few lengths."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.data.corpus import Corpus

log = logging.getLogger(__name__)

IGNORED = -100
"""Label of a token that is not learned, as transformers' losses have it."""


def buckets(max_length: int) -> tuple[int, ...]:
    """The lengths that slices have, shortest first."""
    return tuple(sorted({-(-max_length // 4), -(-max_length // 2), max_length}))


def num_items(batch: Mapping[str, Tensor]) -> int:
    """Tokens of a batch that its loss is the mean over."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


class Rows:
    """Pieces of a corpus, and batches of them. `places` [rows, 2]: first token and length."""

    def __init__(self, corpus: Corpus, places: NDArray[np.int64], *, max_length: int, pad: int) -> None:
        self.corpus, self.places, self.pad = corpus, places, pad
        self._max_length = max_length

    def __len__(self) -> int:
        return len(self.places)

    def chosen(self, which: NDArray[np.bool_]) -> Rows:
        """Some of them."""
        return Rows(self.corpus, self.places[which], max_length=self._max_length, pad=self.pad)

    def row(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The tokens of a row, and which of them are learned."""
        start, length = self.places[number]
        return self.corpus.tokens[start : start + length], self.corpus.trained[start : start + length]

    def longest_first(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """`numbers` by the length of their rows."""
        return numbers[np.argsort(-self.places[numbers, 1], kind="stable")]

    def batch(self, numbers: NDArray[np.int64]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, int64 [rows, length], padded on the right to one of the `buckets`."""
        longest = int(self.places[numbers, 1].max())
        length = next(bucket for bucket in buckets(self._max_length) if bucket >= longest)
        ids = np.full((len(numbers), length), self.pad, np.int64)
        labels = np.full((len(numbers), length), IGNORED, np.int64)
        for place, number in enumerate(numbers):
            tokens, trained = self.row(number)
            ids[place, : len(tokens)] = tokens
            labels[place, : len(tokens)] = np.where(trained, tokens, IGNORED)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


class EvalBatches:
    """All rows of an evaluation, the longest first, in batches of `size` rows."""

    def __init__(self, rows: Rows, size: int) -> None:
        self._rows = rows
        order = rows.longest_first(np.arange(len(rows)))
        self._numbers = [order[start : start + size] for start in range(0, len(order), size)]
        log.info("data: %d rows, %d tokens to evaluate on", len(rows), int(rows.places[:, 1].sum()))

    def __len__(self) -> int:
        return len(self._numbers)

    def batch(self, number: int) -> dict[str, Tensor]:
        """`input_ids`, `labels`, and the tokens that the batch's loss is the mean over."""
        batch = self._rows.batch(self._numbers[number])
        return {**batch, "num_items_in_batch": torch.tensor(num_items(batch))}
