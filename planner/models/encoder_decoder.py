"""Handles encoder-decoders (T5, BART, mBART, NLLB, Pegasus) where they differ from causal language models.

They read one text and write another, so their data are pairs: a prompt, which the encoder reads, and a completion,
whose tokens are the labels. The model's own forward makes the decoder's input from the labels.
"""

from __future__ import annotations

import functools
from typing import Any, cast

from torch import nn
from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, PreTrainedConfig

from planner.errors import Exit, UserError
from planner.importers.llama_factory_templates import PARSED
from planner.job.schema import Job

IGNORED = -100


def is_encoder_decoder(config: PreTrainedConfig) -> bool:
    """Whether `config` describes an encoder-decoder for which transformers has a head that writes texts."""
    declared = bool(getattr(config, "is_encoder_decoder", False))
    return declared and type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING


def has_pairs(model: nn.Module) -> bool:
    """Whether `model`, perhaps wrapped by peft, is an encoder-decoder, whose data are pairs of
    prompt and completion."""
    return is_encoder_decoder(cast(Any, model).config)


def check_sides(job: Job, config: PreTrainedConfig) -> None:
    """Raise UserError for keys of the job that do not apply to an encoder-decoder if its model is one, and for keys
    that apply only to an encoder-decoder if it is none."""
    if not is_encoder_decoder(config):
        if job.max_target_length is not None:
            raise _refused(
                job,
                "is no encoder-decoder, and has no texts of their own to predict",
                f"max_target_length: {job.max_target_length}",
                "leave it out: max_length is for prompt and completion",
            )
        return
    wrong = {
        "preference": (
            job.preference is not None,
            "offmate learns preferences with models that read and write one text",
        ),
        "packing": (job.packing is not False, "a prompt and its completion are a row of their own"),
        "train_on": (job.train_on != "completions", "what it learns is the completion, and all of it"),
        "long_rows": (job.long_rows == "split", "a part of a prompt has no completion; cut, drop or refuse it"),
        "chat_template": (
            job.chat_template not in (None, PARSED),
            "prompt and completion are texts, and no conversation",
        ),
        "chat_template_kwargs": (job.chat_template_kwargs is not None, "its data are no conversations"),
        "add_tokens": (job.add_tokens is not None, "adding tokens to one is not supported yet"),
        "load_in_4bit": (job.load_in_4bit, "adapters on a quantized encoder-decoder are not supported yet"),
        "load_in_8bit": (job.load_in_8bit, "adapters on a quantized encoder-decoder are not supported yet"),
    }
    for key, (is_set, why) in wrong.items():
        if is_set:
            raise _refused(job, f"is an encoder-decoder: {why}", f"{key}: {getattr(job, key)}", f"leave {key} out")


def _refused(job: Job, why: str, number: str, hint: str) -> UserError:
    return UserError(
        f"{job.model} {why}.", code="key-not-for-model", exit_code=Exit.USAGE, numbers=(number,), hint=hint
    )


def have_mean_of_step(model: Any) -> None:
    """Make an encoder-decoder's loss the sum over its micro-batch divided by the tokens of the whole step
    (`num_items_in_batch`). The model's own loss is the mean over the micro-batch. With one micro-batch a step, both
    are the same to the bit."""
    own_forward = model.forward

    @functools.wraps(own_forward)  # transformers' generate looks for the arguments by name
    def forward(*args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        output = own_forward(*args, **kwargs)
        if num_items_in_batch is not None and output.loss is not None:
            # Compute the share first: with one micro-batch a step it is 1 and changes no bit.
            share = (kwargs["labels"] != IGNORED).sum() / num_items_in_batch
            output.loss = output.loss * share.to(output.loss.dtype)
        return output

    model.forward = forward
