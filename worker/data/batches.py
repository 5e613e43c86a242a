"""Decides which tokens each step trains on, as a pure function of the job, the corpus and the step.

A row is a document, cut at `max_length`. With `packing` a row is several documents that fit into `max_length` tokens
together and do not see each other. With `packing: wrapped` all documents are joined and cut into rows of `max_length`
tokens. Every epoch has its own order, drawn from (seed, epoch). Epochs follow each other without a gap: a step that an
epoch cannot fill takes its remaining rows from the next epoch, so every step has the same number of rows and none is
lost. The step number is therefore the position in the data, and a resumed run needs nothing else.

The rows of one step are dealt to its slices by length, longest first, so that short rows share a slice and its padding
is small. A slice's length is that of its longest row, rounded up to one of `padding.buckets`. With `group_by_length` an
epoch has transformers' order, in which rows of similar length follow each other.
"""

from __future__ import annotations

import hashlib
import logging
import math
import tempfile
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from planner.counted import Counted
from planner.errors import Exit, UserError
from planner.importers.llama_factory_templates import slot_template
from planner.job.frozen import Frozen
from planner.job.notes import all_warmup
from planner.job.rope_border import RopeBorder
from planner.job.schema import Job
from planner.units import counted
from worker.data.corpus import Corpus, load_corpus, places_of
from worker.data.ends import taught_ends
from worker.data.padding import EvalBatches, Layout, Rows
from worker.data.pair_rows import PairRows, layout_of_pairs
from worker.data.pairs import closing_tokens
from worker.data.preference_rows import PreferenceRows, preference_layout
from worker.data.seeds import epoch_seed, split_seed
from worker.data.shown_row import ShownRow

log = logging.getLogger(__name__)

_SHOWN = 1500  # characters of the sample in the log
_AT_ONCE = 2**18  # how many tokens are counted together


class Batches:
    """The job's training data as batches, step by step. Tokens are kept in `folder`, or in a temporary folder that is
    removed with the object.

    Raises UserError when the data cannot be read, differ from what `frozen` (a record made at submission) says, or hold
    nothing to train on."""

    def __init__(
        self,
        job: Job,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path | None = None,
        frozen: Frozen | None = None,
        *,
        pairs: bool = False,
        masked: bool = False,
        border: RopeBorder | None = None,
        places: bool = False,
    ) -> None:
        """`pairs`: for an encoder-decoder. `masked`: for a model that must be told what is padding. `border`: for a
        model whose rotary positions depend on the length of rows. `places`: note where records stand, so that shown
        rows can say it."""
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
        """The rows that are held out, or those of the job's `eval_dataset`; None without evaluation."""
        if job.val_size is not None:
            rows, held_out = _hold_out(rows, job)
            self.evaluation = EvalBatches(held_out, job.slice_rows)
        elif job.eval_dataset is not None:
            other = job.model_copy(update={"dataset": job.eval_dataset, "mix_strategy": "concat"})
            log.info("data: for evaluation:")
            corpus = load_corpus(other, tokenizer, folder.with_name(f"eval-{folder.name}"), frozen, pairs=pairs)
            eval_rows = _rows(corpus, other, pad, closing, masked=masked, end=end, border=border)
            self.largest_token = max(self.largest_token, int(corpus.tokens.max()))
            self.evaluation = EvalBatches(eval_rows, job.slice_rows)
        self._rows = rows
        log.info(
            "data: %s, %s; %s a step, %.1f steps an epoch, %s in all",
            counted(len(rows), "row"),
            counted(int(rows.tokens.sum()), "token"),
            counted(self.rows_per_step, "row"),
            self.steps_per_epoch,
            counted(self.total_steps, "step"),
        )
        if (note := all_warmup(job.lr_scheduler_type, job.warmup_steps, self.total_steps)) is not None:
            log.warning("data: %s", note)
        if len(rows) < self.rows_per_step:
            log.warning("data: there are fewer rows than a step has; each step sees some of them more than once")
        content = rows.corpus.fingerprint.encode() + rows.layout.content()
        self.fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()

    @property
    def rows_per_step(self) -> int:
        """The number of rows in one optimizer step, those of all its slices (micro-batches)."""
        return self._job.slice_rows * self._job.gradient_accumulation_steps

    @property
    def steps_per_epoch(self) -> float:
        """The number of steps in which every row is seen once. It is not whole where an epoch ends within a step."""
        return len(self._rows) / self.rows_per_step

    @property
    def total_steps(self) -> int:
        """The number of optimizer steps of the whole training: the job's `max_steps`, else as many as its
        `num_train_epochs` need, at least 1."""
        if self._job.max_steps is not None:
            return self._job.max_steps
        # Rounded before ceil: 0.1 × 30 rows are 3 rows, not 3.0000000000000004.
        return max(1, math.ceil(round(self._job.num_train_epochs * self.steps_per_epoch, 6)))

    def epochs(self, steps: int) -> int:
        """The number of whole epochs that the first `steps` steps go through."""
        return steps * self.rows_per_step // len(self._rows)

    def step(self, step: int) -> list[dict[str, Tensor]]:
        """The batches of step `step` (from 0), one for each slice (micro-batch): tensors [rows, length] by name, as
        `worker.data.padding.Rows.batch` makes them."""
        numbers = self._numbers(step)
        size = self._job.slice_rows
        return [self._rows.batch(numbers[start : start + size]) for start in range(0, len(numbers), size)]

    def sampled(self, step: int) -> list[dict[str, Tensor]]:
        """The rows of which a change of projectors looks at the gradient after `step` steps, as at most 16 batches of
        equal length: the rows that are trained on next."""
        first = step * self.rows_per_step
        numbers = [self._row(place) for place in range(first, first + self._job.lsp_rows)]
        batch = self._rows.batch(np.array(numbers, np.int64))
        size = self._job.lsp_slice_rows
        parts = range(0, len(numbers), size)
        return [{name: tensor[first : first + size] for name, tensor in batch.items()} for first in parts]

    def in_steps(self, steps: int) -> NDArray[np.bool_]:
        """Which rows of `preferences` the first `steps` steps train on, [rows]."""
        found = np.zeros(sum(map(len, self.preferences)), np.bool_)
        found[[self._row(place) for place in range(steps * self.rows_per_step)]] = True
        return found

    @property
    def preferences(self) -> list[PreferenceRows]:
        """The rows of preferences to train on, and those to evaluate on; none in a job without preferences."""
        return [rows for rows in self._every if isinstance(rows, PreferenceRows)]

    def unscored(
        self, missing: NDArray[np.bool_], size: int, together: int
    ) -> Iterator[tuple[list[NDArray[np.int64]], list[dict[str, Tensor]]]]:
        """Yield batches of `size` rows of preferences, at most `together` at a time, the longest first, each with the
        numbers of its rows. `missing` [rows]: which rows are wanted, counted through all `preferences`. Batches without
        any are left out; the others are the same whatever else is missing, so that rows have the same last bits."""
        first = 0
        for rows in self.preferences:
            order = rows.longest_first(np.arange(len(rows)))
            parts = [order[start : start + size] for start in range(0, len(order), size)]
            parts = [part for part in parts if missing[part + first].any()]
            for start in range(0, len(parts), together):
                some = parts[start : start + together]
                yield [part + first for part in some], [rows.batch(part) for part in some]
            first += len(rows)

    def num_tokens(self, step: int) -> int:
        """The number of tokens in step `step` (from 0), learned or not, without padding."""
        return int(self._rows.tokens[self._numbers(step)].sum())

    @property
    def lengths(self) -> tuple[int, int]:
        """(length of `input_ids`, length of `labels`) of the largest slice in any step or evaluation, in tokens,
        padding included. The two differ only for an encoder-decoder."""
        read, labels = zip(*(rows.most for rows in self._every), strict=True)
        return max(read), max(labels)

    @property
    def _every(self) -> list[Rows]:
        return [self._rows] if self.evaluation is None else [self._rows, self.evaluation.rows]

    def counted(self) -> Counted:
        """The figures of the data that a plan depends on: lengths of rows, and numbers of distinct tokens. The latter
        are counted only where a step may have several slices (micro-batches)."""
        several = self._job.gradient_accumulation_steps > 1 or self._job.train_batch_size is not None
        distinct_tokens = tuple(self.distinct_tokens()) if several else ()
        longest = max(int(rows.lengths.max()) for rows in self._every)
        return Counted(longest=longest, lengths=self.lengths, distinct_tokens=distinct_tokens, cut=self.cut)

    def distinct_tokens(self) -> list[int]:
        """For each slice k of a step: the most distinct token ids, padding included, that slices 0 to k have together
        in any step. A tied embedding and head need memory for so many rows."""
        most = [0] * self._job.gradient_accumulation_steps
        seen = np.zeros(max(self.largest_token, self._rows.pad) + 1, np.bool_)
        for step in range(self.total_steps):
            seen[:] = False
            for k, batch in enumerate(self.step(step)):
                seen[batch["input_ids"].numpy()] = True
                most[k] = max(most[k], int(seen.sum()))
        return most

    def num_items(self, batches: Sequence[dict[str, Tensor]]) -> int:
        """The number of items over which a step's loss is the mean. An item is a label to be predicted from the token
        before it or, where the loss is a mean over documents, a document that has such labels."""
        return sum(map(self._rows.num_items, batches))

    @property
    def rows(self) -> int:
        """The number of rows that are trained on in an epoch."""
        return len(self._rows)

    @property
    def tokens(self) -> int:
        """The number of tokens in an epoch, learned or not, without padding."""
        return int(self._rows.tokens.sum())

    @property
    def learned(self) -> int:
        """The number of tokens in an epoch on which the loss is computed."""
        pieces = self._rows.scored
        return int(learned_of(self._rows.corpus, pieces[:, 0], pieces.sum(axis=1)).sum())

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each row that is trained on, without padding: an array [rows]."""
        return self._rows.lengths

    @property
    def cut(self) -> int | None:
        """The number of documents, trained on or held out for evaluation, that are longer than `max_length`, so that
        their ends are cut off; None where the job does not cut ends off."""
        if self._job.long_rows != "cut" or self._job.packing == "wrapped" or isinstance(self._rows, PairRows):
            return None
        if self.preferences:
            return sum(rows.cut for rows in self.preferences)
        return int((np.diff(self._rows.corpus.ends, prepend=0) > self._job.max_length).sum())

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids of the tokens that the data teach the model to end with (`worker.data.ends`)."""
        return taught_ends(self._job, self._tokenizer, self._rows.corpus)

    def shown(self, place: int) -> ShownRow:
        """Row number `place`, counted from 0 in the order of training, as text for people: with its tokens counted and
        what is learned of it marked."""
        number = self._row(place)
        runs: list[tuple[str, bool]] = []
        count = tokens = 0
        titles = self._rows.titles(number)
        for piece, (ids, trained) in enumerate(self._rows.pieces(number)):
            if titles:
                runs.append(("\n" * bool(piece) + f"[{titles[piece]}] ", False))
            borders = np.flatnonzero(np.diff(trained)) + 1
            count, tokens = count + int(trained.sum()), tokens + len(ids)
            for run, learned in zip(np.split(ids, borders), np.split(trained, borders), strict=True):
                runs.append((str(self._tokenizer.decode(run.tolist())), bool(learned[0])))
        pieces = self._rows.layout.of(number)[: len(titles) or None]
        ends = self._rows.corpus.ends
        documents: dict[int, None] = {}
        for start, length in pieces:
            first, last = (int(np.searchsorted(ends, token, "right")) for token in (start, start + length - 1))
            documents |= dict.fromkeys(range(first, last + 1))
        places = places_of(self._folder, set(documents))
        return ShownRow(
            pieces=tuple(runs),
            tokens=tokens,
            learned=count,
            places=tuple(dict.fromkeys(places[n] for n in documents if n in places)),
        )

    def sample(self) -> str:
        """The first row of step 0 as text, with learned tokens between ⟦ and ⟧. The middle of a long text is cut
        out."""
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
            # A step touches two epochs at most, or many tiny ones: keeping the last two orders is enough.
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return int(self._orders[epoch][index])


def _hold_out(rows: Rows, job: Job) -> tuple[Rows, Rows]:
    """The rows to train on and the rows to evaluate on: `val_size` of them, drawn by the seed. With `packing: true`,
    `val_size` counts documents instead; both sets are then packed separately, as other tools do. Raises UserError
    "val-size-too-large"."""
    assert job.val_size is not None
    whole = job.packing is True
    pieces = rows.layout.pieces[np.argsort(rows.layout.pieces[:, 0])]
    total = len(pieces) if whole else len(rows)
    count = math.ceil(job.val_size * total) if job.val_size < 1 else int(job.val_size)
    if count >= total:
        raise UserError(
            "val_size leaves nothing to train on.",
            code="val-size-too-large",
            exit_code=Exit.USAGE,
            numbers=(f"{total} {'documents' if whole else 'rows'}, {count} of them to evaluate on",),
            hint="use a smaller val_size, or eval_dataset",
        )
    generator = torch.Generator().manual_seed(split_seed(job.seed))
    held_out = np.zeros(total, np.bool_)
    held_out[torch.randperm(total, generator=generator).numpy()[:count]] = True
    if not whole:
        return rows.chosen(~held_out), rows.chosen(held_out)
    log.info("data: %d of %d documents are to evaluate on, and packed apart", count, total)
    trained, evaluated = (_packed(pieces[which], job.max_length) for which in (~held_out, held_out))
    return rows.laid_out(trained), rows.laid_out(evaluated)


def _rows(
    corpus: Corpus,
    job: Job,
    pad: int,
    closing: int | None,
    *,
    masked: bool,
    end: int | None,
    border: RopeBorder | None,
) -> Rows:
    """The rows of a corpus. `closing`: the corpus is of pairs whose prompts end with this many special tokens; None for
    other corpora. `end`: as in `Rows`."""
    tokens = None if border is None else border.tokens
    if closing is None:
        if job.preference is not None:
            layout = preference_layout(corpus, job)
            rows: Rows = PreferenceRows(corpus, layout, job=job, pad=pad, masked=masked, border=tokens)
        else:
            rows = Rows(
                corpus,
                rows_of(corpus, job),
                max_length=job.max_length,
                pad=pad,
                masked=masked,
                by_document=job.loss_weighting == "documents",
                end=end,
                border=tokens,
            )
        check_sides(job, rows, border)
        return rows
    layout = layout_of_pairs(corpus, job, closing)
    return PairRows(corpus, layout, max_length=job.max_length, pad=pad, most_target=job.most_target_tokens)


def rows_of(corpus: Corpus, job: Job) -> Layout:
    """The layout of all rows, which says which tokens of the corpus each row holds. Rows without anything to learn are
    left out; logs what is cut and left out. Raises UserError "nothing-to-train" where no row is left, and
    "rows-too-long" where the job forbids to cut them."""
    total, longest = len(corpus.tokens), job.max_length
    if job.packing == "wrapped":
        starts = np.arange(0, total, longest, dtype=np.int64)
        ends = np.minimum(starts + longest, total)
        log.info(
            "data: packed %s into %s of %s",
            counted(len(corpus.ends), "document"),
            counted(len(starts), "row"),
            counted(longest, "token"),
        )
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
                int(cut.sum()),
                len(ends),
                longest,
                lost,
                total,
                "packing: wrapped uses them all, a larger max_length more",
            )
        ends = np.minimum(ends, starts + longest)
    # A row's first token is not learned: nothing stands before it from which to predict it.
    useful = learned_of(corpus, np.minimum(starts + 1, ends), ends) > 0
    if not useful.any():
        raise UserError(
            "The dataset has nothing to train on.",
            code="nothing-to-train",
            exit_code=Exit.USAGE,
            numbers=(
                f"{counted(len(corpus.ends), 'document')}, {counted(total, 'token')}, "
                f"{int(corpus.trained.sum())} of them to be learned",
                f"{counted(len(useful), 'row')} of at most {counted(longest, 'token')}, none with a learned token "
                "after its first",
            ),
            hint="use a larger max_length, data with completions, or train_on: all",
        )
    if not useful.all():
        log.warning("data: %d of %d rows have nothing to learn and are left out", int((~useful).sum()), len(useful))
    pieces = np.stack((starts, ends - starts), axis=1)[useful]
    return _packed(pieces, longest) if job.packing is True else Layout.single(pieces)


def learned_of(corpus: Corpus, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of learned tokens in each of the token ranges from `starts[i]` to `ends[i]`, which are in the order of
    the corpus: an array [ranges]. It counts `_AT_ONCE` tokens at a time, because running sums over all `trained` flags
    together would take eight times the memory of the flags."""
    learned = np.zeros(len(starts), np.int64)
    first = 0
    while first < len(starts):
        past = max(first + 1, int(np.searchsorted(ends, starts[first] + _AT_ONCE, "right")))
        low, high = int(starts[first]), int(ends[past - 1])
        counts = np.concatenate((np.zeros(1, np.int64), np.cumsum(corpus.trained[low:high], dtype=np.int64)))
        learned[first:past] = counts[ends[first:past] - low] - counts[starts[first:past] - low]
        first = past
    return learned


def _long_rows(job: Job, count: int, documents: int, longest: int) -> None:
    """Log that documents longer than `max_length` are left out, or, with `long_rows: refuse`, raise UserError."""
    if job.long_rows == "refuse":
        raise UserError(
            "Documents are longer than max_length.",
            code="rows-too-long",
            exit_code=Exit.USAGE,
            numbers=(
                f"{count} of {documents}, the longest {counted(longest, 'token')}; max_length is {job.max_length}",
            ),
            hint="use a larger max_length, or long_rows: cut or drop",
        )
    log.warning(
        "data: %d of %d documents are longer than max_length %d and left out (long_rows: drop)",
        count,
        documents,
        job.max_length,
    )


def _packed(pieces: NDArray[np.int64], longest: int) -> Layout:
    """Pack by best-fit decreasing: each piece, longest first, goes into the fullest row that still has room for it."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # tokens left -> rows
    rooms: list[int] = []  # the keys of with_room, in order
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
        if free := room - length:
            if free not in with_room:
                insort(rooms, free)
            with_room.setdefault(free, []).append(row)
    log.info(
        "data: packed %s into %s of at most %s",
        counted(len(pieces), "document"),
        counted(len(rows), "row"),
        counted(longest, "token"),
    )
    return Layout(
        pieces=pieces[[number for row in rows for number in row]],
        ends=np.cumsum([len(row) for row in rows], dtype=np.int64),
        isolated=True,
    )


# ---- checks that, in models whose rotary positions depend on row length, no row is computed by another row's length


def check_sides(job: Job, rows: Rows, border: RopeBorder | None) -> None:
    """Raise UserError "rope-by-length" where a row's result would depend on the length of other rows in its
    micro-batch, or of other documents packed into the same row. This happens with rotary embeddings whose frequencies
    change with the longest row, beyond `border` tokens. `border` None: the model has none of these."""
    if border is None:
        return
    lengths = rows.layout.pieces[:, 1] if rows.layout.isolated else rows.every
    beyond = lengths > border.tokens
    alone = job.tensor_rows == 1 and not rows.layout.isolated
    if not beyond.any() or (not border.by_length and (alone or beyond.all())):
        return
    units = "documents" if rows.layout.isolated else "rows"
    if border.by_length:
        then, least = "beyond it, the rope (dynamic) has other frequencies for every length, padding included", ""
    else:
        then = "beyond it, the rope (longrope) has other frequencies, and all of a micro-batch have the same"
        least = "; or per_device_train_batch_size: 1 with packing: false"
    raise UserError(
        f"The model computes {units} differently when others in the micro-batch are longer.",
        code="rope-by-length",
        exit_code=Exit.USAGE,
        numbers=(
            f"{int(beyond.sum())} of {len(beyond)} {units} are longer than {counted(border.tokens, 'token')}; {then}",
        ),
        hint=f"use max_length: {border.tokens}{least}",
    )
