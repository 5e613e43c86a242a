"""Makes rows and batches from an encoder-decoder's pairs (`worker.data.pairs`); prompts and completions are padded
separately."""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.units import counted
from worker.data.corpus import Corpus
from worker.data.padding import IGNORED, Layout, Rows, buckets

log = logging.getLogger(__name__)


def layout_of_pairs(corpus: Corpus, job: Job, closing: int) -> Layout:
    """The layout (which tokens each row holds) with one row for every pair of prompt and completion. A prompt that is
    too long keeps its beginning and its last `closing` tokens, which are special tokens; a completion that is too long
    keeps its beginning. Logs what is cut and left out. Raises UserError "nothing-to-train" where no pair is left, and
    "rows-too-long" where the job forbids to cut them."""
    ends = corpus.ends
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1])) if len(ends) else ends
    learned = np.array([corpus.trained[a:b].sum() for a, b in zip(starts, ends, strict=True)], np.int64)
    sources = ends - starts - learned
    most_source, most_target = job.max_length, job.most_target_tokens
    long = (sources > most_source) | (learned > most_target)
    keep = (learned > 0) & (sources > 0)
    if long.any():
        longest = f"{int(sources.max())} and {counted(int(learned.max()), 'token')}"
        numbers = f"{int(long.sum())} of {len(long)}, the longest {longest}"
        limits = f"max_length {most_source} and max_target_length {most_target}"
        if job.long_rows == "refuse":
            raise UserError(
                "Prompts or completions are longer than a row.",
                code="rows-too-long",
                exit_code=Exit.USAGE,
                numbers=(f"{numbers}; {limits}",),
                hint="use a larger one, or long_rows: cut or drop",
            )
        done = "left out (long_rows: drop)" if job.long_rows == "drop" else "cut"
        log.warning("data: pairs longer than %s are %s: %s", limits, done, numbers)
        if job.long_rows == "drop":
            keep &= ~long
    if not keep.any():
        raise UserError(
            "The dataset has nothing to train on.",
            code="nothing-to-train",
            exit_code=Exit.USAGE,
            numbers=(f"{counted(len(keep), 'pair')}, none with a prompt and a completion",),
            hint="give data with completions",
        )
    if not keep.all():
        log.warning("data: %d of %d pairs are left out", int((~keep).sum()), len(keep))
    starts, sources, learned = starts[keep], sources[keep], learned[keep]
    middles, targets = starts + sources, np.minimum(learned, most_target)
    cut, closing = sources > most_source, min(closing, most_source - 1)
    counts = 1 + cut.astype(np.int64)
    past = np.cumsum(counts)
    pieces = np.empty((int(counts.sum()), 2), np.int64)
    pieces[past - counts] = np.stack((starts, np.where(cut, most_source - closing, sources + targets)), axis=1)
    pieces[past[cut] - 1] = np.stack((middles[cut] - closing, closing + targets[cut]), axis=1)
    return Layout(pieces=pieces, ends=past)


class PairRows(Rows):
    """Rows of an encoder-decoder's corpus, each a pair of prompt and completion, and batches of them. `most_target`:
    the most tokens of a completion."""

    def __init__(self, corpus: Corpus, layout: Layout, *, max_length: int, pad: int, most_target: int) -> None:
        super().__init__(corpus, layout, max_length=max_length, pad=pad)
        self._most_target = most_target

    def chosen(self, which: NDArray[np.bool_]) -> PairRows:
        """A copy with only those rows for which the boolean array `which` [rows] is True."""
        return PairRows(
            self.corpus,
            self.layout.chosen(which),
            max_length=self._max_length,
            pad=self.pad,
            most_target=self._most_target,
        )

    @property
    def most(self) -> tuple[int, int]:
        """(padded length of the longest prompt, padded length of the longest completion), in tokens. The two may be in
        different rows."""
        pieces, first = self.layout.pieces, np.r_[0, self.layout.ends[:-1]]
        learned = [int(self.corpus.trained[start : start + length].sum()) for start, length in pieces]
        targets = np.add.reduceat(learned, first)
        longest = int((self.lengths - targets).max())
        return _padded_length(longest, self._max_length), _padded_length(int(targets.max()), self._most_target)

    def batch(self, numbers: NDArray[np.int64]) -> dict[str, Tensor]:
        """The pairs with these `numbers` as a batch: `input_ids` with their `attention_mask` [rows, length of prompts],
        and `labels` [rows, length of completions], int64, each padded on the right to one of its `buckets` (see
        `_padded_length`)."""
        rows = [[np.concatenate(parts) for parts in zip(*self.pieces(number), strict=True)] for number in numbers]
        ids, mask = _padded([ids[~learned] for ids, learned in rows], self._max_length, self.pad)
        labels, _ = _padded([ids[learned] for ids, learned in rows], self._most_target, IGNORED)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def learned(self, batch: dict[str, Tensor]) -> int:
        """The number of a batch's labels that are to be predicted. The first label counts: the decoder predicts it from
        its start token."""
        return int((batch["labels"] != IGNORED).sum())


def _padded_length(longest: int, most: int) -> int:
    """The length to which a longest row of `longest` tokens is padded. Only every other one of the buckets is used,
    because each pair of lengths has code of its own."""
    return next(bucket for bucket in reversed(buckets(most)[::-1][::2]) if bucket >= longest)


def _padded(rows: list[NDArray[np.int32]], most: int, pad: int) -> tuple[Tensor, Tensor]:
    """The rows as one tensor, and a tensor that is 1 at their tokens and 0 at padding, both int64."""
    length = _padded_length(max(map(len, rows)), most)
    ids, mask = np.full((len(rows), length), pad, np.int64), np.zeros((len(rows), length), np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)], mask[place, : len(row)] = row, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)
