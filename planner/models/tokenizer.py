"""Loads a job's tokenizer with the tokens that the job adds, and adds rows for them to the model's
embedding and head."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import nn
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from planner.data.local_data import is_local
from planner.errors import Exit, UserError, disk_full, first_line, is_disk_full
from planner.hub import check_reached, not_given
from planner.importers.llama_factory_templates import PARSED, slot_template
from planner.importers.templates import named_template
from planner.job.pins import tokenizer_revision
from planner.job.schema import Job
from planner.models.hf_names import own_code, own_code_refused


def load_tokenizer(job: Job) -> PreTrainedTokenizerBase:
    """The job's tokenizer, with the tokens that the job adds and, if the job gives one, its chat template. Raises
    UserError."""
    its_name = f"the tokenizer {job.tokenizer}"
    if not is_local(job.tokenizer):
        check_reached(its_name, job.tokenizer)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            job.tokenizer, revision=tokenizer_revision(job), trust_remote_code=False
        )
    except Exception as error:  # anybody may have written its files: loading them may raise anything
        if is_disk_full(error):
            raise disk_full(error, its_name) from error
        if (refused := not_given(its_name, error)) is not None:
            raise refused from error
        if isinstance(error, ValueError) and (code := _own_code_of(job)):
            raise own_code_refused("tokenizer", job.tokenizer, code) from None
        raise UserError(
            f"{job.tokenizer} cannot be used as a tokenizer.",
            code="tokenizer-not-usable",
            exit_code=Exit.USAGE,
            numbers=(first_line(error),),
            hint="give tokenizer, a folder with tokenizer.json or a Hugging Face id",
        ) from error
    slots = slot_template(job.chat_template)
    if job.chat_template is not None and slots is None:
        tokenizer.chat_template = job.chat_template
    elif tokenizer.chat_template is None and any(entry.converter is not None for entry in job.data):
        tokenizer.chat_template = named_template("chatml")  # as LLaMA-Factory's v1 does for such a tokenizer
    tokenizer.add_tokens([_added(token) for token in job.add_tokens or ()])
    _set_special_tokens(tokenizer, job)
    if job.rewards and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # as TRL does: a classifier must be able to tell padding from text
    named = slots is not None and job.chat_template != PARSED  # PARSED: made from the tokenizer's own
    if slots is not None and named and (tokenizer.chat_template is None or slots.replaces_jinja):
        tokenizer.chat_template = slots.jinja(tokenizer.bos_token or "", tokenizer.eos_token or "")
    return tokenizer


def _set_special_tokens(tokenizer: PreTrainedTokenizerBase, job: Job) -> None:
    """Set the job's `special_tokens`, which are existing tokens of the tokenizer. Raises UserError for tokens that it
    does not have."""
    special_tokens = dict(job.special_tokens or {})
    if not special_tokens:
        return
    wanted = [token for value in special_tokens.values() for token in ([value] if isinstance(value, str) else value)]
    vocabulary = tokenizer.get_vocab()
    if missing := [token for token in wanted if token not in vocabulary]:
        raise UserError(
            f"The tokenizer {job.tokenizer} has no token {missing[0]}.",
            code="token-not-there",
            exit_code=Exit.USAGE,
            numbers=(f"of special_tokens {', '.join(missing)} not among its {len(vocabulary)}",),
            hint=f"to add them, give add_tokens: [{', '.join(missing)}] too",
        )
    special = {
        name: _added(value, special=True)
        if isinstance(value, str)
        else [_added(token, special=True) for token in value]
        for name, value in special_tokens.items()
    }
    tokenizer.add_special_tokens(cast(Any, special))


def _added(token: str, *, special: bool = False) -> AddedToken:
    return AddedToken(token, normalized=False, special=special)


def with_rows_for_tokens(model: nn.Module, job: Job) -> None:
    """Add rows to the embedding and head of `model` if a token that the job adds has none. This is
    `resize_token_embeddings` under the job's seed, which draws new rows around the mean of the present ones; on meta
    the rows are made without values. Raises UserError if only adapters are trained, which would never learn the
    tokens."""
    if not job.add_tokens:
        return
    bare = load_tokenizer(job.model_copy(update={"add_tokens": None, "special_tokens": None}))
    vocabulary, embedding = bare.get_vocab(), cast(Any, model).get_input_embeddings()
    added = [token for token in job.add_tokens if token not in vocabulary]
    # Some tokenizers have more tokens than their model's embedding has rows: the others are never seen.
    beyond = len(bare) + len(added) if added else 1 + max(vocabulary[token] for token in job.add_tokens)
    short = beyond > embedding.num_embeddings
    if job.method == "lora" and (short or added):
        _check_learned(model, job)
    if short:
        torch.manual_seed(job.seed)
        rows = len(bare) + len(added)
        logger = logging.getLogger("transformers.modeling_utils")
        before = logger.level
        # transformers logs each time how it draws rows, even if trained rows will replace them.
        logger.setLevel(logging.ERROR)
        try:
            cast(Any, model).resize_token_embeddings(rows, mean_resizing=not embedding.weight.is_meta)
        finally:
            logger.setLevel(before)


def _check_learned(model: nn.Module, job: Job) -> None:
    its, whole = cast(Any, model), job.lora_modules_to_save or ()
    ends = [its.get_input_embeddings(), its.get_output_embeddings()]
    names = [next(name for name, module in model.named_modules() if module is end) for end in ends if end is not None]
    if frozen := [name for name in names if not any(f".{name}".endswith(f".{wanted}") for wanted in whole)]:
        raise UserError(
            "Tokens are added, and LoRA alone would never learn them.",
            code="tokens-not-learned",
            exit_code=Exit.USAGE,
            numbers=(f"add_tokens: {', '.join(job.add_tokens or ())}; frozen: {', '.join(frozen)}",),
            hint=f"lora_modules_to_save: [{', '.join(name.rpartition('.')[2] for name in names)}]",
        )


def _own_code_of(job: Job) -> dict[str, str]:
    try:
        return own_code(get_tokenizer_config(job.tokenizer, revision=tokenizer_revision(job)).get("auto_map"))
    except (OSError, ValueError):
        return {}
