"""Tokenizes the job's data into three arrays on disk, once per run, so that a resumed run sees the very same data.

`tokens.npy` int32 [tokens], `trained.npy` bool [tokens], `ends.npy` int64 [documents]: document i is the tokens from
`ends[i - 1]` (or 0) to `ends[i]`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from planner.errors import Exit, UserError
from planner.job.frozen import Frozen, check_frozen
from planner.job.schema import Job
from planner.units import counted
from worker.data.documents import documents_of
from worker.data.first_token import first_token_of
from worker.data.formats import Document
from worker.data.left_out import LeftOut
from worker.data.pairs import encode_pairs
from worker.data.sharing import Sharing

log = logging.getLogger(__name__)

_KEYS = ("dataset", "tokenizer", "chat_template", "max_samples", "packing", "train_on")
_CUT = ("max_length", "long_rows")  # they decide what counts as a duplicate, and what is cut before it is stored
_ONCE = ("dataset_exact_deduplication", *_CUT)
_WHERE_GIVEN = (
    "preference",
    "chat_template_kwargs",
    "min_sample_len",
    "special_tokens",
    "add_tokens",
    "model_revision",
    "tokenizer_revision",
)
_MIXED = ("mix_strategy", "interleave_probs", "seed")  # the tokens depend on these where entries are mixed
_SAY_EVERY_S = 10.0
_PIECE = 2**20  # how many values are written at a time
_PLACES = "places.txt"
_BATCH = 512  # the most documents given to the tokenizer at once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """The token ids of all documents, one after another, with a flag for each token on whether it is learned; arrays
    mapped from disk. `fingerprint` is another text when any token differs."""

    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    ends: NDArray[np.int64]
    fingerprint: str


def load_corpus(
    job: Job,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    frozen: Frozen | None = None,
    *,
    pairs: bool = False,
    places: bool = False,
) -> Corpus:
    """The job's data as tokens, written to `folder`, or found there from an earlier start of the same job.

    `pairs`: encode prompts and completions for an encoder-decoder (`worker.data.pairs`). `places`: also write a file
    with a line for each document, which says where its record stands in the data. `frozen`: a record, made at
    submission, of what the data were (`planner.job.frozen`); None if there is none. Raises UserError when a dataset
    cannot be read or understood, holds nothing to train on, or must be read and differs from `frozen`."""
    values, mixed = job.model_dump(mode="json"), job.mix_strategy != "concat"
    more = (
        *(key for key in _WHERE_GIVEN if values[key]),
        *(_MIXED if mixed else []),
        *(_ONCE if job.dataset_exact_deduplication else []),
        *(_CUT if job.long_rows == "share" or _begins_rows(job) else []),
        *(["broken_rows"] if job.broken_rows == "skip" else []),
    )
    keys = {key: value for key, value in values.items() if key in (*_KEYS, *more)} | ({"pairs": True} if pairs else {})
    if (corpus := _open(folder, keys)) is not None:
        log.info("data: %s as tokenized at the first start (%s)", counted(len(corpus.tokens), "token"), folder)
        return corpus
    trained_on = job.model_copy(update={"eval_dataset": None})
    check_frozen(trained_on, frozen)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write(job, tokenizer, temporary, pairs, places)
        check_frozen(trained_on, frozen)  # again: reading may take hours, and the data may have changed meanwhile
        record = {"format": 1, "keys": keys, "fingerprint": _fingerprint(temporary)}
        (temporary / "corpus.json").write_text(json.dumps(record, indent=1), "utf-8")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)
    corpus = _open(folder, keys)
    assert corpus is not None
    return corpus


def _open(folder: Path, keys: dict[str, object]) -> Corpus | None:
    """The corpus in `folder`; None when there is none, when it is damaged, or when it was made for other keys."""
    try:
        record = json.loads((folder / "corpus.json").read_text("utf-8"))
        if record["keys"] != keys or record["fingerprint"] != _fingerprint(folder):
            log.warning("data: %s does not fit this job or is damaged; tokenizing again", folder)
            return None
        arrays = {n: np.load(folder / f"{n}.npy", mmap_mode="r") for n in ("tokens", "trained", "ends")}
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return Corpus(fingerprint=record["fingerprint"], **arrays)


def _fingerprint(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in ("tokens", "trained", "ends"):
        with (folder / f"{name}.npy").open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def check_tokenizer(job: Job, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError "slow-tokenizer" for a tokenizer that cannot say which characters of a text each token stands
    for."""
    if not tokenizer.is_fast:
        raise UserError(
            f"The tokenizer {job.tokenizer} does not tell where its tokens are in the text.",
            code="slow-tokenizer",
            exit_code=Exit.USAGE,
            hint="use a tokenizer with a tokenizer.json",
        )


def places_of(folder: Path, documents: set[int]) -> dict[int, str]:
    """Document number (from 0) -> where its record stands in the data files, in words. Empty where `load_corpus` did
    not note these places."""
    if not (folder / _PLACES).exists():
        return {}
    with (folder / _PLACES).open(encoding="utf-8", errors="surrogateescape") as lines:
        return {number: line.rstrip("\n") for number, line in enumerate(lines) if number in documents}


def _write(job: Job, tokenizer: PreTrainedTokenizerBase, folder: Path, pairs: bool, places: bool) -> None:
    check_tokenizer(job, tokenizer)
    if tokenizer.eos_token_id is None:
        log.warning("data: the tokenizer has no end-of-text token; documents follow each other without one")
    ends = array("q")
    count = 0
    left_out, sharing = LeftOut(job, pairs=pairs), Sharing(job, pairs=pairs)
    said_at = time.monotonic()
    with (
        (folder / "tokens.raw").open("wb") as tokens,
        (folder / "trained.raw").open("wb") as trained,
        (folder / _PLACES).open("w", encoding="utf-8", errors="surrogateescape") if places else nullcontext() as noted,
    ):
        for documents in batched(documents_of(job, tokenizer, pairs)):
            its_places = (document.place for document in documents for _ in document.rows or (None,))
            for place, whole in zip(its_places, encode(documents, tokenizer, pairs=pairs), strict=True):
                ids, learned = sharing.cut(*whole)
                if left_out.leaves_out(ids, learned):
                    continue
                tokens.write(ids.tobytes())
                trained.write(learned.tobytes())
                count += len(ids)
                ends.append(count)
                if noted is not None:
                    noted.write(place.replace("\n", " ") + "\n")
            if time.monotonic() - said_at >= _SAY_EVERY_S:
                log.info("data: %s, %s so far", counted(len(ends), "document"), counted(count, "token"))
                said_at = time.monotonic()
    begin = first_token_of(tokenizer, job) if count and _begins_rows(job) else None
    if begin is not None:
        np.memmap(folder / "tokens.raw", np.int32, "r+")[:: job.max_length] = begin
    sharing.say()
    left_out.say()
    left_out.check()
    _save(folder / "ends.npy", np.frombuffer(ends, np.int64) if ends else np.zeros(0, np.int64))
    for name, kind in (("tokens", np.int32), ("trained", np.bool_)):
        raw = folder / f"{name}.raw"
        if count:
            _save(folder / f"{name}.npy", np.memmap(raw, kind, "r"))
        else:
            _save(folder / f"{name}.npy", np.zeros(0, kind))
        raw.unlink()


def _begins_rows(job: Job) -> bool:
    """Whether the tokenizer's first token replaces the first token of each row of packed texts, as in LLaMA-Factory
    where the tokenizer adds one."""
    return job.packing == "wrapped" and any(entry.formatting is not None for entry in job.data)


def _save(path: Path, values: NDArray[Any]) -> None:
    """Save an array as `np.save` does, but so that a full disk can be told from other errors."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(values))
        for start in range(0, len(values), _PIECE):
            file.write(values[start : start + _PIECE].tobytes())


def batched(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group the documents, in their order, into lists of neighbours that are tokenized with the same settings, at most
    `_BATCH` in each."""
    for _, alike in groupby(documents, key=lambda document: (document.special, bool(document.pieces or document.rows))):
        while batch := list(islice(alike, _BATCH)):
            yield batch


def encode(
    documents: list[Document], tokenizer: PreTrainedTokenizerBase, *, pairs: bool = False
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """Yield (token ids [tokens], learned [tokens]) for each document, or for each of the rows that it makes. A token is
    learned if it shares a character with one of the document's trained spans."""
    if pairs:
        yield from encode_pairs(documents, tokenizer)
        return
    if documents[0].pieces or documents[0].rows:
        yield from _encode_pieces(documents, tokenizer)
        return
    encoded = tokenizer(
        [document.text for document in documents],
        add_special_tokens=documents[0].special,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    end = tokenizer.eos_token_id
    encodings: list[Encoding] = encoded.encodings or []
    for document, tokens, encoding in zip(documents, encoded["input_ids"], encodings, strict=True):
        count = len(tokens)
        closed = document.ended and count > 0 and tokens[-1] == end
        if document.ended and not closed and end is not None:
            tokens.append(end)
        learned = np.zeros(len(tokens), np.bool_)
        if document.everything:
            learned[:] = True
        else:
            _mark_learned(learned[:count], document, encoding)
            if closed or len(tokens) > count:  # an end-of-text token may have no characters of the text
                ends = bool(document.trained) and document.trained[-1][1] == len(document.text)
                learned[-1] = ends or (closed and bool(learned[-1]))
        yield np.array(tokens, np.int32), learned


def _encode_pieces(
    documents: list[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    rows = [(document, pieces) for document in documents for pieces in document.rows or (document.pieces,)]
    texts = [piece for _, pieces in rows for piece, _ in pieces if isinstance(piece, str)]
    encoded = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ())
    for document, pieces in rows:
        tokenized = [(next(encoded) if isinstance(piece, str) else [piece], learned) for piece, learned in pieces]
        learned = np.repeat([learned for _, learned in tokenized], [len(tokens) for tokens, _ in tokenized])
        ids = np.array([token for tokens, _ in tokenized for token in tokens], np.int32)
        yield ids, learned.astype(np.bool_) | document.everything


def _mark_learned(learned: NDArray[np.bool_], document: Document, encoding: Encoding) -> None:
    """Set `learned`, which is all false, to true where a token shares a character with a trained span."""
    size = len(document.text)
    if document.trained == ((0, size),):  # all but what the tokenizer adds at both ends; getting all places is slow

        def is_added(token: int) -> bool:
            place = encoding.token_to_chars(token)
            return place is None or place[1] == 0 or place[0] >= size

        first, past = 0, len(learned)
        while first < past and is_added(first):
            first += 1
        while past > first and is_added(past - 1):
            past -= 1
        learned[first:past] = True
        return
    places = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(learned)).reshape(-1, 2)
    for begin, past in document.trained:
        learned |= (places[:, 0] < past) & (places[:, 1] > begin)
