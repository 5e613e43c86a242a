"""Which tokens each step trains on. A pure function of the job, the corpus and the step.

Rows are documents (cut at `max_length`); with `packing` several documents that fit into `max_length` tokens and
do not see each other; with `packing: wrapped` chunks of `max_length` tokens of all documents one after another.
Every epoch has its own order, drawn from (seed, epoch). Epochs follow each other without a seam: a step that an epoch
cannot fill takes its remaining rows from the next epoch, so every step has the same number of rows and none is lost.
So the position in the data is the number of the step, and a resumed run needs nothing else.

The rows of one step are dealt to its slices by length, longest first, so that short rows share a slice and its padding
is small. A slice's length is that of its longest row, rounded up to one of `padding.buckets`. With `group_by_length` an
epoch's order is transformers' one in which rows of like length follow each other.
"""

from __future__ import annotations

import hashlib
import logging
import math
import tempfile
from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from planner.counted import Counted
from planner.errors import Exit, UserError
from planner.job.frozen import Frozen
from planner.job.notes import all_warmup
from planner.job.rope_border import RopeBorder
from planner.job.schema import Job
from planner.job.slot_templates import slot_template
from planner.units import counted
from worker.data.corpus import Corpus, load_corpus, places_of
from worker.data.ends import taught_ends
from worker.data.padding import EvalBatches, Layout, Rows
from worker.data.pair_rows import PairRows, layout_of_pairs
from worker.data.pairs import closing_tokens
from worker.data.rope_rows import check_sides
from worker.data.seeds import epoch_seed, split_seed
from worker.data.shown_row import ShownRow

log = logging.getLogger(__name__)

_SHOWN = 1500  # characters of the sample in the log
_AT_ONCE = 2**18  # tokens that are counted together


class Batches:
    """The job's training data, step by step. Tokens live in `folder`, or in a temporary one that goes with the object.

    Raises UserError when the data cannot be read, are not those that `frozen` says, or when nothing in it can be
    trained on.
    """

    def __init__(
        self, job: Job, tokenizer: PreTrainedTokenizerBase, folder: Path | None = None, frozen: Frozen | None = None,
        *, pairs: bool = False, masked: bool = False, border: RopeBorder | None = None,
        places: bool = False,
    ) -> None:  # fmt: skip
        """`places`: rows that are shown say where their records stand; `pairs`: for an encoder-decoder; `masked`: for
        a model that is to know what is padding; `border`: of a model whose positions go by the length of rows."""
        self._job = job
        self._tokenizer = tokenizer
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="offmate-data-")
            folder = Path(self._temporary.name) / "data"
        self._folder = folder
        corpus = load_corpus(job, tokenizer, folder, frozen, pairs=pairs, places=places)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._orders: dict[int, NDArray[np.int64]] = {}
        pad = pad if pad is not None else 0
        closing = closing_tokens(tokenizer) if pairs else None
        slots = slot_template(job.chat_template)
        end = tokenizer.eos_token_id if slots is not None and slots.ends_once else None
        rows = _rows(corpus, job, pad, closing, masked=masked, end=end, border=border)
        self.largest_token = int(corpus.tokens.max())
        self.evaluation: EvalBatches | None = None
        """What is held out, or the job's `eval_dataset`."""
        if job.val_size is not None:
            rows, held_out = _hold_out(rows, job)
            self.evaluation = EvalBatches(held_out, job.slice_rows)
        elif job.eval_dataset is not None:
            other = job.model_copy(update={"dataset": job.eval_dataset, "mix_strategy": "concat"})
            log.info("data: for evaluation:")
            corpus = load_corpus(
                other, tokenizer, folder.with_name(f"eval-{folder.name}"), frozen, pairs=pairs
            )  # fmt: skip
            found = _rows(corpus, other, pad, closing, masked=masked, end=end, border=border)
            self.largest_token = max(self.largest_token, int(corpus.tokens.max()))
            self.evaluation = EvalBatches(found, job.slice_rows)
        self._rows = rows
        log.info(
            "data: %s, %s; %s a step, %.1f steps an epoch, %s in all",
            counted(len(rows), "row"), counted(int(rows.lengths.sum()), "token"), counted(self.rows_per_step, "row"),
            self.steps_per_epoch, counted(self.total_steps, "step"),
        )  # fmt: skip
        if (note := all_warmup(job.lr_scheduler_type, job.warmup_steps, self.total_steps)) is not None:
            log.warning("data: %s", note)
        if len(rows) < self.rows_per_step:
            log.warning("data: there are fewer rows than a step has; each step sees some of them more than once")
        content = rows.corpus.fingerprint.encode() + rows.layout.content()
        self.fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()

    @property
    def rows_per_step(self) -> int:
        """Rows of all slices of one optimizer step."""
        return self._job.slice_rows * self._job.gradient_accumulation_steps

    @property
    def steps_per_epoch(self) -> float:
        """Steps that see every row once; not a whole number where an epoch ends within a step."""
        return len(self._rows) / self.rows_per_step

    @property
    def total_steps(self) -> int:
        """`max_steps`, or as many as `num_train_epochs` need."""
        if self._job.max_steps is not None:
            return self._job.max_steps
        # Rounded first: 0.1 × 30 rows are 3 rows, not 3.0000000000000004.
        return max(1, math.ceil(round(self._job.num_train_epochs * self.steps_per_epoch, 6)))

    def epochs(self, steps: int) -> int:
        """Whole epochs in the first `steps` steps."""
        return steps * self.rows_per_step // len(self._rows)

    def step(self, step: int) -> list[dict[str, Tensor]]:
        """Step `step` (from 0): for each slice a batch as `worker.data.padding.Rows.batch` makes it."""
        numbers = self._numbers(step)
        size = self._job.slice_rows
        return [self._rows.batch(numbers[start : start + size]) for start in range(0, len(numbers), size)]

    def num_tokens(self, step: int) -> int:
        """Tokens of step `step`, learned or not, without padding."""
        return int(self._rows.lengths[self._numbers(step)].sum())

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of a row in the largest slice, of `input_ids` and of `labels`, padding included."""
        read, labels = zip(*(rows.most for rows in self._every), strict=True)
        return max(read), max(labels)

    @property
    def _every(self) -> list[Rows]:
        return [self._rows] if self.evaluation is None else [self._rows, self.evaluation.rows]

    def counted(self) -> Counted:
        """What a plan of the job depends on; the tokens are counted where the step has, or may have, several slices."""
        several = self._job.gradient_accumulation_steps > 1 or self._job.train_batch_size is not None
        distinct_tokens = tuple(self.distinct_tokens()) if several else ()
        longest = max(int(rows.lengths.max()) for rows in self._every)
        return Counted(longest=longest, lengths=self.lengths, distinct_tokens=distinct_tokens, cut=self.cut)

    def distinct_tokens(self) -> list[int]:
        """For each slice the most distinct tokens, padding included, that it and those before it have in any step."""
        most = [0] * self._job.gradient_accumulation_steps
        seen = np.zeros(max(self.largest_token, self._rows.pad) + 1, np.bool_)
        for step in range(self.total_steps):
            seen[:] = False
            for k, batch in enumerate(self.step(step)):
                seen[batch["input_ids"].numpy()] = True
                most[k] = max(most[k], int(seen.sum()))
        return most

    def num_items(self, batches: Sequence[dict[str, Tensor]]) -> int:
        """What a step's loss is the mean over so many of: labels to be predicted from the token before, or documents
        that have some."""
        return sum(map(self._rows.num_items, batches))

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return len(self._rows)

    @property
    def tokens(self) -> int:
        """Tokens of an epoch, learned or not, without padding."""
        return int(self._rows.lengths.sum())

    @property
    def learned(self) -> int:
        """Tokens of an epoch that are learned."""
        pieces = self._rows.layout.pieces[np.argsort(self._rows.layout.pieces[:, 0])]
        return int(learned_of(self._rows.corpus, pieces[:, 0], pieces.sum(axis=1)).sum())

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """Tokens of each row that is trained on, without padding."""
        return self._rows.lengths

    @property
    def cut(self) -> int | None:
        """Documents that are cut at their end, trained on or held out; None where rows are not cut there."""
        if self._job.long_rows != "cut" or self._job.packing == "wrapped" or isinstance(self._rows, PairRows):
            return None
        return int((np.diff(self._rows.corpus.ends, prepend=0) > self._job.max_length).sum())

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids of the tokens that end what is learned (`worker.data.ends`)."""
        return taught_ends(self._job, self._tokenizer, self._rows.corpus)

    def shown(self, place: int) -> ShownRow:
        """The row at `place` in the order of training."""
        number = self._row(place)
        found: list[tuple[str, bool]] = []
        count = 0
        for ids, trained in self._rows.pieces(number):
            borders = np.flatnonzero(np.diff(trained)) + 1
            count += int(trained.sum())
            for run, learned in zip(np.split(ids, borders), np.split(trained, borders), strict=True):
                found.append((str(self._tokenizer.decode(run.tolist())), bool(learned[0])))
        pieces = self._rows.layout.of(number)
        ends = self._rows.corpus.ends
        documents: dict[int, None] = {}
        for start, length in pieces:
            first, last = (int(np.searchsorted(ends, token, "right")) for token in (start, start + length - 1))
            documents |= dict.fromkeys(range(first, last + 1))
        places = places_of(self._folder, set(documents))
        return ShownRow(
            pieces=tuple(found), tokens=int(self._rows.lengths[number]), learned=count,
            places=tuple(dict.fromkeys(places[n] for n in documents if n in places)),
        )  # fmt: skip

    def sample(self) -> str:
        """The first row of step 0 as text, learned tokens between ⟦ and ⟧, the middle cut out where it is long."""
        return self.shown(0).marked(_SHOWN)

    def _numbers(self, step: int) -> NDArray[np.int64]:
        """The rows of a step, longest first."""
        first = step * self.rows_per_step
        numbers = np.array([self._row(place) for place in range(first, first + self.rows_per_step)], np.int64)
        return self._rows.longest_first(numbers)

    def _row(self, place: int) -> int:
        """The row at `place` in the endless sequence of epochs."""
        epoch, index = divmod(place, len(self._rows))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(epoch_seed(self._job.seed, epoch))
            if self._job.group_by_length:
                from transformers.trainer_pt_utils import get_length_grouped_indices

                lengths = self._rows.lengths.tolist()
                grouped = get_length_grouped_indices(lengths, self.rows_per_step, generator=generator)  # type: ignore[no-untyped-call]
                order = np.array(grouped, np.int64)
            else:
                order = torch.randperm(len(self._rows), generator=generator).numpy()
            # A step touches two epochs at most, or many tiny ones: the last two are enough to keep.
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return int(self._orders[epoch][index])


def _hold_out(rows: Rows, job: Job) -> tuple[Rows, Rows]:
    """The rows to train on, and those to evaluate on: `val_size` of them, drawn by the seed. Where documents are packed
    whole, it is of the documents, which are then packed apart, as other tools do."""
    assert job.val_size is not None
    whole = job.packing is True
    pieces = rows.layout.pieces[np.argsort(rows.layout.pieces[:, 0])]
    total = len(pieces) if whole else len(rows)
    count = math.ceil(job.val_size * total) if job.val_size < 1 else int(job.val_size)
    if count >= total:
        raise UserError(
            "val_size leaves nothing to train on.", code="val-size-too-large", exit_code=Exit.USAGE,
            numbers=(f"{total} {'documents' if whole else 'rows'}, {count} of them to evaluate on",),
            hint="use a smaller val_size, or eval_dataset",
        )  # fmt: skip
    generator = torch.Generator().manual_seed(split_seed(job.seed))
    held_out = np.zeros(total, np.bool_)
    held_out[torch.randperm(total, generator=generator).numpy()[:count]] = True
    if not whole:
        return rows.chosen(~held_out), rows.chosen(held_out)
    log.info("data: %d of %d documents are to evaluate on, and packed apart", count, total)
    trained, evaluated = (_packed(pieces[which], job.max_length) for which in (~held_out, held_out))
    return rows.laid_out(trained), rows.laid_out(evaluated)


def _rows(
    corpus: Corpus, job: Job, pad: int, closing: int | None, *, masked: bool, end: int | None,
    border: RopeBorder | None,
) -> Rows:  # fmt: skip
    """Those of a corpus; `closing`: of pairs, whose prompts have so many special tokens behind them; `end`: as
    `Rows`."""
    if closing is None:
        rows = Rows(
            corpus, rows_of(corpus, job), max_length=job.max_length, pad=pad, masked=masked,
            by_document=job.loss_weighting == "documents", end=end, border=None if border is None else border.tokens,
        )  # fmt: skip
        check_sides(job, rows, border)
        return rows
    layout = layout_of_pairs(corpus, job, closing)
    return PairRows(corpus, layout, max_length=job.max_length, pad=pad, most_target=job.most_target_tokens)


def rows_of(corpus: Corpus, job: Job) -> Layout:
    """Every row that has something to learn. Says what is cut and left out. Raises UserError where nothing is left."""
    total, longest = len(corpus.tokens), job.max_length
    if job.packing == "wrapped":
        starts = np.arange(0, total, longest, dtype=np.int64)
        ends = np.minimum(starts + longest, total)
        log.info(
            "data: packed %s into %s of %s",
            counted(len(corpus.ends), "document"), counted(len(starts), "row"), counted(longest, "token"),
        )  # fmt: skip
    else:
        ends = corpus.ends
        starts = np.concatenate((np.zeros(1, np.int64), ends[:-1])) if len(ends) else ends
        cut = ends - starts > longest
        if cut.any() and job.long_rows == "split":
            pieces = -(-(ends - starts) // longest)
            place = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            starts, ends = np.repeat(starts, pieces) + place * longest, np.repeat(ends, pieces)
        elif cut.any() and job.long_rows != "cut":
            starts, ends = starts[~cut], ends[~cut]
            _long_rows(job, int(cut.sum()), len(cut), int(np.diff(corpus.ends, prepend=0).max()))
        elif cut.any():
            lost = int((ends - starts - longest)[cut].sum())
            log.warning(
                "data: %d of %d documents are longer than max_length %d and cut; %d of %d tokens are not seen (%s)",
                int(cut.sum()), len(ends), longest, lost, total,
                "packing: wrapped uses them all, a larger max_length more",
            )  # fmt: skip
        ends = np.minimum(ends, starts + longest)
    # A row's first token has nothing before it to be predicted from.
    useful = learned_of(corpus, np.minimum(starts + 1, ends), ends) > 0
    if not useful.any():
        raise UserError(
            "The dataset has nothing to train on.", code="nothing-to-train", exit_code=Exit.USAGE,
            numbers=(
                f"{counted(len(corpus.ends), 'document')}, {counted(total, 'token')}, "
                f"{int(corpus.trained.sum())} of them to be learned",
                f"{counted(len(useful), 'row')} of at most {counted(longest, 'token')}, none with a learned token "
                "after its first",
            ),
            hint="use a larger max_length, data with completions, or train_on: all",
        )  # fmt: skip
    if not useful.all():
        log.warning("data: %d of %d rows have nothing to learn and are left out", int((~useful).sum()), len(useful))
    pieces = np.stack((starts, ends - starts), axis=1)[useful]
    return _packed(pieces, longest) if job.packing is True else Layout.single(pieces)


def learned_of(corpus: Corpus, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many tokens are learned from each of `starts` to its end, all in the order of the corpus. In pieces of some
    tokens: a number for each of all would take eight times the memory of the tokens' own file."""
    found = np.zeros(len(starts), np.int64)
    first = 0
    while first < len(starts):
        past = max(first + 1, int(np.searchsorted(ends, starts[first] + _AT_ONCE, "right")))
        low, high = int(starts[first]), int(ends[past - 1])
        counts = np.concatenate((np.zeros(1, np.int64), np.cumsum(corpus.trained[low:high], dtype=np.int64)))
        found[first:past] = counts[ends[first:past] - low] - counts[starts[first:past] - low]
        first = past
    return found


def _long_rows(job: Job, count: int, documents: int, longest: int) -> None:
    """Say that documents longer than `max_length` are left out, or raise UserError where the job wants that."""
    if job.long_rows == "refuse":
        raise UserError(
            "Documents are longer than max_length.", code="rows-too-long", exit_code=Exit.USAGE,
            numbers=(
                f"{count} of {documents}, the longest {counted(longest, 'token')}; max_length is {job.max_length}",
            ),
            hint="use a larger max_length, or long_rows: cut or drop",
        )  # fmt: skip
    log.warning(
        "data: %d of %d documents are longer than max_length %d and left out (long_rows: drop)",
        count, documents, job.max_length,
    )  # fmt: skip


def _packed(pieces: NDArray[np.int64], longest: int) -> Layout:
    """Best-fit decreasing: every piece, the longest first, goes into the row with the least room that it fits into."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # tokens left -> rows
    rooms: list[int] = []  # its keys, in order
    for number in np.argsort(-pieces[:, 1], kind="stable"):
        length = int(pieces[number, 1])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), longest
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(int(number))
        if left := room - length:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(row)
    log.info(
        "data: packed %s into %s of at most %s",
        counted(len(pieces), "document"), counted(len(rows), "row"), counted(longest, "token"),
    )  # fmt: skip
    return Layout(
        pieces=pieces[[number for row in rows for number in row]],
        ends=np.cumsum([len(row) for row in rows], dtype=np.int64), isolated=True,
    )  # fmt: skip
