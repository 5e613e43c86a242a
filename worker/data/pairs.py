"""Encodes the data of an encoder-decoder: the encoder reads a prompt, the decoder learns to write a completion.

In a corpus the tokens of a prompt and its completion follow each other. Only those of the completion are marked as
learned, so that the two can be separated again. Each side has the special tokens that the tokenizer gives it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from planner.data.entry import ALPACA as ALPACA_PROMPT
from planner.data.entry import DataEntry, PromptFormat
from planner.data.records import Kind
from planner.errors import Exit, UserError
from worker.data.formats import Document

Encoded = tuple[NDArray[np.int32], NDArray[np.bool_]]


def entry_of_pairs(entry: DataEntry, kind: Kind) -> DataEntry:
    """A copy of the dataset's entry whose instructions are written with a plain prompt format instead of a chat
    template, for an encoder-decoder. Raises UserError "no-pairs" where records of this kind are not pairs of prompt and
    completion."""
    if kind not in ("prompt", "alpaca"):
        raise _no_pairs(f"the records of {entry.path} are read as {kind}")
    written = entry.prompt_format or PromptFormat.model_validate(ALPACA_PROMPT)
    return entry.model_copy(update={"prompt_format": written}) if kind == "alpaca" else entry


def _no_pairs(number: str) -> UserError:
    return UserError(
        "An encoder-decoder learns from pairs: a text that it reads, and one that it writes.",
        code="no-pairs",
        exit_code=Exit.USAGE,
        numbers=(number,),
        hint="give columns prompt and completion, both texts, or instruction, (input,) output",
    )


def encode_pairs(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded]:
    """Yield (token ids [tokens], learned [tokens]) for each document, a pair of prompt and completion whose tokens
    follow each other; only the completion's are learned. A completion without an end-of-text token gets one. Raises
    UserError "no-pairs" for a document that is not a pair."""
    borders = [document.trained[0][0] for document in documents if document.special and document.trained]
    if len(borders) < len(documents):
        raise _no_pairs("a prompt is a conversation")
    plain = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    texts = list(zip((document.text for document in documents), borders, strict=True))
    sources = tokenizer([text[:border] for text, border in texts], **plain)["input_ids"]
    targets = tokenizer(text_target=[text[border:] for text, border in texts], **plain)["input_ids"]
    end = tokenizer.eos_token_id
    for source, target in zip(sources, targets, strict=True):
        if end is not None and end not in target:
            target.append(end)
        learned = np.zeros(len(source) + len(target), np.bool_)
        learned[len(source) :] = True
        yield np.array([*source, *target], np.int32), learned


def closing_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of special tokens that the tokenizer puts at the end of a prompt."""
    marks = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    return next((count for count, mark in enumerate(reversed(marks)) if not mark), len(marks))
