"""Finds the tokens that a job teaches its model to end with."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from typing import cast

from transformers import PreTrainedTokenizerBase

from planner.data.entry import DataEntry
from planner.errors import UserError
from planner.importers.llama_factory_templates import PARSED, slot_template
from planner.job.schema import Job
from worker.data.chat import ChatTemplate
from worker.data.corpus import Corpus

_AT_ONCE = 2**20  # how many tokens are looked at together
_DOCUMENTS = 1000


def taught_ends(job: Job, tokenizer: PreTrainedTokenizerBase, corpus: Corpus) -> tuple[int, ...]:
    """The ids of the tokens with which the model learns to end. These are the tokens with which the chat template ends
    an answer, and the tokenizer's end token, as far as they are learned in `corpus`. If none of them is learned, they
    are the special tokens that are the last learned token of one of the first `_DOCUMENTS` documents."""
    wanted = _possible_ends(job, tokenizer)
    taught: set[int] = set()
    for start in range(0, len(corpus.tokens), _AT_ONCE):
        piece = slice(start, start + _AT_ONCE)
        learned = corpus.tokens[piece][corpus.trained[piece]]
        taught |= {end for end in wanted if end not in taught and (learned == end).any()}
        if len(taught) == len(wanted):
            break
    return tuple(end for end in wanted if end in taught) or _last_ones(tokenizer, corpus)


def _last_ones(tokenizer: PreTrainedTokenizerBase, corpus: Corpus) -> tuple[int, ...]:
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    endings: dict[int, None] = {}
    for start, past in pairwise([0, *corpus.ends[:_DOCUMENTS].tolist()]):
        learned = corpus.tokens[start:past][corpus.trained[start:past]]
        if len(learned) and int(learned[-1]) in special:
            endings[int(learned[-1])] = None
    return tuple(endings)


def _possible_ends(job: Job, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    marks: list[int] = []
    if (slots := slot_template(job.chat_template)) is not None and job.chat_template != PARSED:
        vocabulary = tokenizer.get_vocab()
        marks = [vocabulary[stop] for stop in slots.stops if stop in vocabulary]
    elif tokenizer.chat_template:
        for everything, values in sorted({_template_of(job, entry) for entry in job.data}):
            with contextlib.suppress(UserError):  # several templates, none for conversations: the data have none
                stops = ChatTemplate(tokenizer, everything=everything, values=json.loads(values)).stops
                marks += [cast(int, tokenizer.convert_tokens_to_ids(mark)) for mark in stops]
    eos = tokenizer.eos_token_id
    return tuple(dict.fromkeys([*marks, *([eos] if eos is not None else [])]))


def _template_of(job: Job, entry: DataEntry) -> tuple[bool, str]:
    """(whether the entry uses the tokenizer's own template rather than TRL's form of it, the values that the template
    is told, as JSON)."""
    values = {**(job.chat_template_kwargs or {}), **(entry.chat_template_kwargs or {})}
    is_own = job.train_on != "completions" or entry.learned is not None or entry.converter is not None
    is_own |= job.preference is not None
    return is_own, json.dumps(values, sort_keys=True)
