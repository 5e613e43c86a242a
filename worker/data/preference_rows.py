"""Makes rows and batches from records of preferences: pairs of answers to one prompt, or answers marked good or bad.

In a corpus each record is two documents, the prompt with its chosen answer and the prompt with its rejected one. An
answer without a counterpart is a pair with one empty document. Only the tokens of answers are marked as learned.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.keys.preference import DESIRABLE, REFERENCE
from planner.units import counted
from worker.data.corpus import Corpus
from worker.data.padding import Layout, Piece, Rows, num_items

log = logging.getLogger(__name__)

_SIDES = 2
"""The lines of a batch that each row takes."""
_TOGETHER = 1000
"""The records of pairs that TRL makes answers of at a time (the batch of `datasets`)."""


def preference_layout(corpus: Corpus, job: Job) -> Layout:
    """The layout (which tokens each row holds) with one row for each pair, its chosen answer first. With KTO there is
    one row for each answer: the answer itself, then its prompt, then the answer to another prompt.

    A prompt with its answer is cut after `max_length` tokens. As in TRL, pairs are left out of which an answer would
    have no token. For a reward model an answer and its prompt are one text. Logs what is cut and left out. Raises
    UserError "nothing-to-train" where no pair is left, and "rows-too-long" where the job forbids to cut them."""
    ends = corpus.ends
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1])) if len(ends) else ends
    if job.dataset_exact_deduplication:
        first = np.repeat(_first_of_equals(corpus, starts, ends), _SIDES)
        starts, ends = starts[first], ends[first]
    lengths = ends - starts
    prompts = np.array([_prompt_tokens(corpus, a, b) for a, b in zip(starts, ends, strict=True)], np.int64)
    long = lengths > job.max_length
    if long.any() and job.long_rows == "refuse":
        raise _too_long(job, int(long.sum()), int((lengths > 0).sum()), int(lengths.max()))
    # Each token of an answer is predicted from one before it, but scored by a reward model from the first on.
    usable = lengths > 0 if job.rewards else np.minimum(lengths, job.max_length) > np.maximum(prompts, 1)
    if job.long_rows == "drop":
        usable &= ~long
    there = lengths > 0
    pieces = np.stack((starts, np.minimum(lengths, job.max_length)), axis=1)
    if job.preference == "kto":
        _check_left(job, "answer", int(there.sum()), int((there & ~usable).sum()))
        chosen = _unpaired(there)
        chosen = chosen[usable[chosen]]
        _tell_labels(chosen % _SIDES == 0)
    else:
        pairs: NDArray[np.bool_] = np.all((usable & there).reshape(-1, _SIDES), axis=1)
        _check_left(job, "pair", len(pairs), int((~pairs).sum()))
        chosen = np.flatnonzero(np.repeat(pairs, _SIDES))
        _check_equal(corpus, pieces[chosen])
    if cut := int(long[chosen].sum()):
        log.warning(
            "data: %d of %s are longer than max_length %d, with their prompts, and cut",
            cut,
            counted(len(chosen), "answer"),
            job.max_length,
        )
    if job.preference == "kto":
        return _with_others(starts[chosen], prompts[chosen], pieces[chosen], lengths[chosen], job)
    return Layout(pieces=pieces[chosen], ends=np.arange(_SIDES, len(chosen) + 1, _SIDES))


def _first_of_equals(corpus: Corpus, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which records, [records], are not those whose two documents have the same tokens as an earlier record's."""
    seen: set[tuple[bytes, ...]] = set()
    first = np.ones(len(starts) // _SIDES, np.bool_)
    for record in range(len(first)):
        documents = range(_SIDES * record, _SIDES * (record + 1))
        known = tuple(hashlib.blake2b(corpus.tokens[starts[n] : ends[n]].tobytes()).digest() for n in documents)
        first[record] = known not in seen
        seen.add(known)
    log.info(
        "data: %d of %s came before and are left out (dataset_exact_deduplication)",
        int((~first).sum()),
        counted(len(first), "record"),
    )
    return first


def _check_equal(corpus: Corpus, pieces: NDArray[np.int64]) -> None:
    """Warn of pairs whose two answers are the same, of which nothing can be learned. Raises UserError
    "nothing-to-train" where there are no others."""
    chosen, rejected = pieces[::_SIDES], pieces[1::_SIDES]
    equal = sum(
        int(one[1] == other[1] and np.array_equal(_tokens(corpus, one), _tokens(corpus, other)))
        for one, other in zip(chosen, rejected, strict=True)
    )
    if equal == len(chosen):
        raise UserError(
            "The dataset has nothing to train on.",
            code="nothing-to-train",
            exit_code=Exit.USAGE,
            numbers=(f"{counted(equal, 'pair')}, each with the same tokens as chosen and as rejected answer",),
            hint="use a larger max_length, or other data",
        )
    if equal:
        log.warning("data: %d of %s have the same tokens as both answers", equal, counted(len(chosen), "pair"))


def _tokens(corpus: Corpus, piece: NDArray[np.int64]) -> NDArray[np.int32]:
    tokens: NDArray[np.int32] = corpus.tokens[piece[0] : piece[0] + piece[1]]
    return tokens


def _tell_labels(good: NDArray[np.bool_]) -> None:
    """Log how many answers are good ones; `good` [answers]."""
    log.info("data: %s and %d bad", counted(int(good.sum()), "good answer"), int((~good).sum()))
    if good.all() or not good.any():
        log.warning("data: all answers are %s; kto learns from good and bad ones", "good" if good.any() else "bad")


def _unpaired(there: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The numbers of the documents that are `there`, in the order of the data. As in TRL, the chosen answers of
    `_TOGETHER` records come before their rejected ones where records have both."""
    numbers = np.flatnonzero(there)
    if not there.reshape(-1, _SIDES).all(axis=1).any():
        return numbers
    records, sides = np.divmod(numbers, _SIDES)
    order: NDArray[np.int64] = numbers[np.lexsort((records, sides, records // _TOGETHER))]
    return order


def _with_others(
    starts: NDArray[np.int64],
    prompts: NDArray[np.int64],
    answers: NDArray[np.int64],
    lengths: NDArray[np.int64],
    job: Job,
) -> Layout:
    """KTO's layout. As in TRL the other answers are those of the row before, in groups of as many rows as a micro-batch
    has, in the order of the data; the first row of a group gets the last one's. If a micro-batch has one row, all rows
    are one group, as in LLaMA-Factory."""
    numbers = np.arange(len(starts))
    size = job.slice_rows if job.is_split and job.slice_rows > 1 else len(starts)
    begins = numbers // size * size
    before = np.where(numbers == begins, np.minimum(begins + size, len(starts)) - 1, numbers - 1)
    room = np.maximum(job.max_length - prompts, 0)
    others = np.stack((starts + prompts, np.minimum((lengths - prompts)[before], room)), axis=1)
    others[:, 0] = (starts + prompts)[before]
    rows = np.stack((answers, np.stack((starts, prompts), axis=1), others), axis=1)
    return Layout(pieces=rows.reshape(-1, 2), ends=np.arange(3, 3 * len(starts) + 1, 3))


def _prompt_tokens(corpus: Corpus, start: int, end: int) -> int:
    """The number of tokens before the first that is learned."""
    learned = corpus.trained[start:end]
    return int(learned.argmax()) if learned.any() else len(learned)


def _too_long(job: Job, long: int, answers: int, longest: int) -> UserError:
    numbers = f"{long} of {counted(answers, 'answer')} with their prompts, the longest {counted(longest, 'token')}"
    return UserError(
        "Answers, with their prompts, are longer than max_length.",
        code="rows-too-long",
        exit_code=Exit.USAGE,
        numbers=(f"{numbers}; max_length is {job.max_length}",),
        hint=f"use a larger max_length, or long_rows: {'drop' if job.rewards else 'cut or drop'}",
    )


def _check_left(job: Job, unit: str, records: int, left_out: int) -> None:
    if left_out == records:
        which = "end" if job.long_rows == "drop" else "begin"
        raise UserError(
            "The dataset has nothing to train on.",
            code="nothing-to-train",
            exit_code=Exit.USAGE,
            numbers=(f"{counted(records, unit)}, none whose answers {which} within max_length {job.max_length}",),
            hint="use a larger max_length",
        )
    if left_out:
        why = "longer than" if job.long_rows == "drop" else "with an answer that begins after"
        log.warning("data: %d of %d %ss, %s max_length %d, are left out", left_out, records, unit, why, job.max_length)


class PreferenceRows(Rows):
    """Rows of preferences, two lines of a batch each. `reference` [rows, 2]: the log-probabilities of the two lines by
    the reference model, in fp32; zeros until it is set."""

    def __init__(
        self, corpus: Corpus, layout: Layout, *, job: Job, pad: int, masked: bool = False, border: int | None = None
    ) -> None:
        super().__init__(corpus, layout, max_length=job.max_length, pad=pad, masked=masked, border=border)
        self._job, self._unpaired = job, job.preference == "kto"
        firsts = np.r_[0, layout.ends[:-1]]
        self._sides = np.stack(
            (layout.pieces[firsts, 1], np.add.reduceat(layout.pieces[:, 1], firsts) - layout.pieces[firsts, 1]), axis=1
        )
        self.lengths = self._sides.max(axis=1)
        self.reference = np.zeros(self._sides.shape, np.float32)

    def laid_out(self, layout: Layout) -> PreferenceRows:
        """A copy with the same corpus and settings, but rows by another `layout`, and without a reference."""
        return PreferenceRows(self.corpus, layout, job=self._job, pad=self.pad, masked=self.masked, border=self.border)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The number of tokens of each row, that of both its lines; [rows]."""
        totals: NDArray[np.int64] = self._sides.sum(axis=1)
        return totals

    @property
    def every(self) -> NDArray[np.int64]:
        """The number of tokens of each line, [lines]."""
        return self._sides.reshape(-1)

    @property
    def cut(self) -> int:
        """The number of answers that are cut at `max_length`, with their prompts."""
        starts = self.layout.pieces[:: 3 if self._unpaired else 1, 0]
        documents = np.searchsorted(self.corpus.ends, starts, "right")
        return int((self.corpus.ends[documents] - starts > self._max_length).sum())

    @property
    def scored(self) -> NDArray[np.int64]:
        """The answers with their prompts, [answers, 2] (first token, length), in the order of the corpus."""
        pieces = self.layout.pieces[:: 3 if self._unpaired else 1]
        return pieces[np.argsort(pieces[:, 0])]

    def pieces(self, number: int) -> Iterator[Piece]:
        """The answers of row number `number`, each with its prompt, as (token ids, learned)."""
        yield from itertools.islice(super().pieces(number), 1 if self._unpaired else _SIDES)

    def titles(self, number: int) -> tuple[str, ...]:
        """What each of the row's `pieces` is, in a word."""
        if not self._unpaired:
            return "chosen", "rejected"
        return ("good" if self._desirable(np.array([number]))[0] else "bad",)

    def sequences(self, numbers: NDArray[np.int64]) -> list[list[Piece]]:
        """The first lines of all rows, then their second ones."""
        rows = [list(super(PreferenceRows, self).pieces(int(number))) for number in numbers]
        return [*([row[0]] for row in rows), *([_joined(row[1:])] for row in rows)]

    def batch(self, numbers: NDArray[np.int64]) -> dict[str, Tensor]:
        """The rows with these `numbers` as a batch: see `planner.models.preference_loss`."""
        batch = super().batch(numbers)
        if self._job.refers:
            batch[REFERENCE] = torch.from_numpy(self.reference[numbers].T.reshape(-1))
        if self._unpaired:
            batch[DESIRABLE] = torch.from_numpy(self._desirable(numbers).astype(np.int64))
        return batch

    def _desirable(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each row's answer is the chosen one of its record, which has an even number among the documents."""
        firsts = self.layout.pieces[np.r_[0, self.layout.ends[:-1]][numbers], 0]
        documents = np.searchsorted(self.corpus.ends, firsts, "right")
        good: NDArray[np.bool_] = documents % _SIDES == 0
        return good

    def num_items(self, batch: dict[str, Tensor]) -> int:
        """The number of a batch's pairs, or of its answers with KTO, over which its loss is the mean."""
        return len(batch["labels"]) // _SIDES

    def learned(self, batch: dict[str, Tensor]) -> int:
        """The number of a batch's tokens that are scored."""
        answers = len(batch["labels"]) // (_SIDES if self._unpaired else 1)
        return num_items({"labels": batch["labels"][:answers]})


def _joined(pieces: list[Piece]) -> Piece:
    ids, learned = zip(*pieces, strict=True)
    return np.concatenate(ids), np.concatenate(learned)
