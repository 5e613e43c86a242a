"""Finds the token (BOS) with which texts begin according to the tokenizer's own file."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from planner.job.pins import tokenizer_revision
from planner.job.schema import Job


def first_token_of(tokenizer: PreTrainedTokenizerBase, job: Job) -> int | None:
    """The id of the tokenizer's first token (BOS) if its own file asks to add it with `add_bos_token`, which
    transformers 5 no longer reads; None for other tokenizers."""
    try:
        setting = get_tokenizer_config(job.tokenizer, revision=tokenizer_revision(job)).get("add_bos_token")
    except (OSError, ValueError):
        setting = None
    return tokenizer.bos_token_id if setting is True or getattr(tokenizer, "add_bos_token", False) else None
