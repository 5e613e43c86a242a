"""Loads the job's model with its weights into host memory."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from planner.errors import Exit, UserError, disk_full, first_line, is_disk_full
from planner.hub import not_given
from planner.job.pins import revision_of
from planner.job.schema import Job
from planner.job.weights import check_weights
from planner.keys.adapter import takes_from_base
from planner.keys.lora import has_no_weights
from planner.models.encoder_decoder import is_encoder_decoder
from planner.models.hf_model import (
    build_model,
    model_class,
    model_config,
    without_weights,
    working_dtype,
)
from planner.models.hf_names import own_code
from planner.models.lsp import with_cores
from planner.models.packed_experts import experts_packed_as_read
from planner.models.peft_lora import check_adapter, load_adapter, with_adapters
from planner.models.peft_parts import beginnings, read_begun, write_begun
from planner.models.quantized import as_unpacked, loading_options, parameters_of, unpacks
from planner.models.reward_model import HEAD, name_padding
from planner.models.tokenizer import load_tokenizer, with_rows_for_tokens
from planner.models.trainable import freeze_others
from planner.models.trainer_options import set_trainer_options
from planner.models.written import said_of_dtype
from planner.units import counted

log = logging.getLogger(__name__)

_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    ImportError,
    EOFError,
    SafetensorError,
    pickle.UnpicklingError,
)
"""The errors that reading damaged or wrong weight files may raise."""


def load_model(
    job: Job,
    *,
    layers: int | None = None,
    begun: Path | None = None,
    begins: bool = False,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Load the job's model with its weights onto the CPU, in its working dtype or another `dtype`, in training mode,
    without a key-value cache. `layers`: keep only so many of its first layers. `begun`: the file that records the
    initial adapters that took over a part of the model's own weights. `begins`: the adapters begin now, and this file
    is written. Raises UserError.

    With a folder without weights, the model gets its own initialization under `job.seed`, in the working dtype. With
    `bf16` the weights are read as bf16 and the fp32 masters start from them, because an fp32 copy beside them would
    double the host memory of loading. For weights published in bf16 that changes nothing; others start one rounding
    away, which is logged."""
    dtype, takes = dtype or working_dtype(job), job.method == "lora" and takes_from_base(job.init_lora_weights)
    begun_values = read_begun(begun) if takes and begun is not None and not begins else None
    config = model_config(job)
    every = None if layers is None else int(config.get_text_config().num_hidden_layers)
    if layers is not None and not is_encoder_decoder(config):  # an encoder-decoder has two stacks of layers
        _keep_layers(config, layers)
    if job.rewards:
        name_padding(config, load_tokenizer(job))
    torch.manual_seed(job.seed)  # also for single weights that a folder lacks
    check_weights(job)
    if has_no_weights(job.model):
        log.info("model: %s has no weights; starting from random ones under seed %d", job.model, job.seed)
        model = build_model(job, config, dtype)
    else:
        attention = None if job.attn_implementation == "sdpa" else job.attn_implementation
        options = loading_options(job, config)
        packing = experts_packed_as_read(job) if job.quantize_moe_experts else contextlib.nullcontext()
        try:
            with packing, _no_report(job):
                loaded: Any = model_class(job, config).from_pretrained(
                    job.model,
                    config=config,
                    dtype=dtype,
                    attn_implementation=attention,
                    output_loading_info=True,
                    trust_remote_code=False,
                    revision=revision_of(job),
                    **options,
                )
        except _UNREADABLE as error:
            if is_disk_full(error):
                raise disk_full(error, f"the weights of {job.model}") from error
            if (refused := not_given(f"the weights of {job.model}", error)) is not None:
                raise refused from error
            raise UserError(
                f"The weights of {job.model} cannot be loaded.",
                code="weights-not-usable",
                exit_code=Exit.USAGE,
                numbers=(first_line(error),),
                hint="check that the folder or the download is complete",
            ) from error
        model, info = loaded
        if unpacks(config):
            with without_weights():
                as_unpacked(model, build_model(job, config, dtype))
        missing = set(info["missing_keys"])
        if job.rewards and (head := f"{HEAD}.weight") in missing:
            log.info("model: %s, which gives texts their reward, starts at random under seed %d", head, job.seed)
            missing.remove(head)
        if missing:
            log.warning(
                "model: %s not in %s, and started at random: %s",
                counted(len(missing), "weight"),
                job.model,
                ", ".join(sorted(missing)[:5]),
            )
    if code := own_code(getattr(config, "auto_map", None)):
        files = sorted({place.partition(".")[0] for place in code.values()})
        log.warning("model: its own code (%s) is not run; %s is transformers'", ", ".join(files), type(model).__name__)
    cast(Any, model).config.use_cache = False
    with_rows_for_tokens(model, job)
    parameters, name = parameters_of(model), type(model).__name__
    if job.method == "lora":
        if takes and begun_values is None:
            log.info("model: %s decomposes each weight that gets an adapter, on the CPU", job.init_lora_weights)
        model = with_adapters(model, job, layers=every, begun=begun_values)
        if takes and begins and begun is not None:
            write_begun(begun, beginnings(model))
        if job.adapter_name_or_path is not None:
            check_adapter(job)
            load_adapter(model, job.adapter_name_or_path, layers=layers)
            log.info("model: its adapter starts as that in %s", job.adapter_name_or_path)
    elif job.method == "lsp":
        model = with_cores(model, job)
    freeze_others(model, job, layers=every)
    set_trainer_options(model, job)
    if (note := said_of_dtype(job)) is not None:
        log.info("model: %s", note)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    log.info("model: %s, %d parameters, %s; %d are trained", name, parameters, dtype, trained)
    return model.train()


@contextlib.contextmanager
def _no_report(job: Job) -> Iterator[None]:
    """A context in which transformers does not report that a reward model has no head for text and a new one for
    rewards, as it should. Weights that are missing besides are logged by `load_model`."""
    logger = logging.getLogger("transformers.modeling_utils")
    before = logger.level
    if job.rewards:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _keep_layers(config: PreTrainedConfig, layers: int) -> None:
    """Set the number of layers in the config, and cut its lists that have a value for each layer."""
    every = config.num_hidden_layers
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == every:
            setattr(config, key, value[:layers])
    config.num_hidden_layers = layers


def tell_special_tokens(job: Job, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the job's `special_tokens` into the model's configs, as transformers' Trainer does, so that the saved model
    ends its answers with them."""
    if job.special_tokens:
        from transformers.trainer_utils import align_special_tokens

        base = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model
        align_special_tokens(base, tokenizer)  # type: ignore[no-untyped-call]


def check_vocabulary(job: Job, model: nn.Module, largest_token: int, where: str) -> None:
    """Raise UserError "vocabulary-mismatch" when the model's embedding has no row for the token id `largest_token`, the
    largest in the data. `where` says, for the message, where that token comes from."""
    rows = len(cast(Any, model).get_input_embeddings().weight)
    if largest_token >= rows:
        raise UserError(
            f"The tokenizer {job.tokenizer} does not belong to the model {job.model}.",
            code="vocabulary-mismatch",
            exit_code=Exit.USAGE,
            numbers=(f"token {largest_token} is in {where}, the model has {rows}",),
            hint="use the model's own tokenizer",
        )


def check_reach(job: Job, model: nn.Module, largest_token: int, longest: int) -> None:
    """Raise UserError "vocabulary-mismatch" or "max-length-too-large" when the model has no embeddings for the data's
    token ids, up to `largest_token`, or for the positions of rows of `longest` tokens. A model without position
    embeddings only gets a warning in the log."""
    check_vocabulary(job, model, largest_token, "the data")
    embedding = cast(Any, model).get_input_embeddings()
    positions = getattr(cast(Any, model).config, "max_position_embeddings", None)
    if not isinstance(positions, int) or longest <= positions:
        return
    if any(
        isinstance(module, nn.Embedding) and module is not embedding and 0 <= module.num_embeddings - positions <= 2
        for module in model.modules()
    ):
        raise UserError(
            "max_length is more than the model has positions for.",
            code="max-length-too-large",
            exit_code=Exit.USAGE,
            numbers=(f"max_length {job.max_length}, rows of {counted(longest, 'token')}, positions {positions}",),
            hint=f"use max_length: {positions} or less",
        )
    log.warning("model: rows of %d tokens are beyond the %d positions it was made for", longest, positions)
