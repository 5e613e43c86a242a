"""Builds a job's Hugging Face language model from its config, without memory for its weights."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from planner.data.local_data import is_local
from planner.errors import Exit, UserError, disk_full, first_line, is_disk_full
from planner.hub import check_reached, not_given
from planner.job.pins import revision_of
from planner.job.schema import Job
from planner.keys.preference import DESIRABLE, REFERENCE
from planner.models.encoder_decoder import check_sides, has_pairs, is_encoder_decoder
from planner.models.hf_names import own_code, own_code_refused
from planner.models.learning_rates import check_rates
from planner.models.lsp import with_cores
from planner.models.peft_lora import with_adapters
from planner.models.quantized import Quantization
from planner.models.reward_model import as_classifier, check_head
from planner.models.router_loss import weighs_routers
from planner.models.tokenizer import with_rows_for_tokens
from planner.models.trainable import check_tokens_learned, freeze_others
from planner.models.trainer_options import set_trainer_options

_HINT = "give a folder with config.json, or the id of a language model on huggingface.co"


def model_config(job: Job) -> PreTrainedConfig:
    """The config of `job.model`, set up for training: without a cache of keys and values, and that of a classifier for
    a reward model. Each call returns a copy that the caller may change. The file is read once per process, and again
    if it has changed. Raises UserError."""
    folder = Path(job.model)
    stamp = None
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise _unusable(job.model, "the folder has no config.json")
        status = (folder / "config.json").stat()
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
    config = copy.deepcopy(_read_config(job.model, revision_of(job), stamp))
    if job.rewards and not is_encoder_decoder(config):  # which `check_sides` refuses
        as_classifier(config, job.model)
    return config


@functools.lru_cache(maxsize=4)
def _read_config(model: str, revision: str | None, stamp: object) -> PreTrainedConfig:
    its_name = f"the config of {model}"
    if not is_local(model):
        check_reached(its_name, model)
    try:
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    except Exception as error:  # anybody may have written the config: its class may raise anything
        if is_disk_full(error):
            raise disk_full(error, its_name) from error
        if (refused := not_given(its_name, error)) is not None:
            raise refused from error
        if code := _needed_code(model, revision):
            raise own_code_refused("model", model, code) from None
        raise _unusable(model, first_line(error)) from error
    config.use_cache = False
    return cast(PreTrainedConfig, config)


def _needed_code(model: str, revision: str | None) -> dict[str, str]:
    """The code that a model brings with it (`auto_map`) if transformers does not know the model's type; empty for
    other models."""
    try:
        config: object = PreTrainedConfig.get_config_dict(model, revision=revision)[0]
    except Exception:  # there is no config: the caller says so
        return {}
    if not isinstance(config, dict) or config.get("model_type") in CONFIG_MAPPING:
        return {}
    return own_code(config.get("auto_map"))


def pairs_of(job: Job) -> bool:
    """Whether the job's data are pairs of prompt and completion, because its model is an encoder-decoder. Raises
    UserError for a model that cannot be used, and for keys of the job that do not apply to it."""
    config = model_config(job)
    check_sides(job, config)
    if job.ref_model is not None and _sizes(job.model_copy(update={"model": job.ref_model})) != _sizes(job):
        raise other_reference(job)
    return is_encoder_decoder(config)


_SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


def _sizes(job: Job) -> list[object]:
    """What the shapes of most models' weights follow from."""
    text = model_config(job).get_text_config()
    return [getattr(text, name, None) for name in _SIZES]


def other_reference(job: Job) -> UserError:
    """The error to raise where the job's `ref_model` has other weights than its model, whose plan it uses."""
    return UserError(
        "ref_model has other weights than the model that is trained.",
        code="ref-model-differs",
        exit_code=Exit.USAGE,
        numbers=(f"{job.ref_model} beside {job.model}",),
        hint="give a model of the same type and size, such as the one that was fine-tuned before",
    )


def masked_of(job: Job) -> bool:
    """Whether the job's batches need an attention mask, because the loss includes that of the routers of a mixture of
    experts. Raises UserError."""
    return weighs_routers(job, model_config(job))


def beyond_positions(job: Job) -> str | None:
    """A note for the user if the job's rows are longer than the number of positions in the model's config; None if
    they are not. A model with a table of positions cannot run such rows; it is refused when its blocks are searched
    for."""
    most = getattr(model_config(job).get_text_config(), "max_position_embeddings", None)
    longest = max(job.max_length, job.max_target_length or 0)
    if not isinstance(most, int) or longest <= most:
        return None
    return (
        f"max_length {longest} is beyond the {most} positions that the model is made for "
        "(max_position_embeddings): it runs, as it does in transformers, but knows no rows this long."
    )


def working_dtype(job: Job) -> torch.dtype:
    """The dtype of the weights with which the model computes, and which are copied to the device. (The optimizer may
    keep an fp32 master of each.)"""
    return torch.bfloat16 if job.bf16 else torch.float32


def skeleton_model(job: Job, device: torch.device | str = "cpu") -> nn.Module:
    """The job's model in training mode: parameters on meta (no memory, no initialization), buffers real, on `device`.
    For LoRA it has adapters. Weights are tied as the config says. Raises UserError."""
    config = model_config(job)
    check_sides(job, config)
    with without_weights(), torch.device(device):
        model = build_model(job, config)
        if (quantized := Quantization.of(job, config)) is not None:
            quantized.apply(model)
        rows = cast(Any, model).get_input_embeddings().num_embeddings if job.add_tokens else 0
        with_rows_for_tokens(model, job)
        if job.method == "lora":
            model = with_adapters(model, job)
        elif job.method == "lsp":
            model = with_cores(model, job)
    freeze_others(model, job)
    check_tokens_learned(model, job, rows)
    check_rates(model, job)
    set_trainer_options(model, job)
    return model.train()


def build_model(job: Job, config: PreTrainedConfig, dtype: torch.dtype | None = None) -> nn.Module:
    """Create the job's model from `config`, initialized by the model's own code, in `dtype` (None: the dtype that the
    job computes in). Raises UserError."""
    # Models that have only eager attention refuse the name sdpa. With None transformers takes sdpa if the model has it.
    attention = None if job.attn_implementation == "sdpa" else job.attn_implementation
    try:
        model = model_class(job, config).from_config(
            config, dtype=dtype or working_dtype(job), attn_implementation=attention, trust_remote_code=False
        )
    except Exception as error:  # as in `model_config`
        code = own_code(getattr(config, "auto_map", None))
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" in code:
            raise own_code_refused("model", job.model, code) from None
        raise _unusable(job.model, first_line(error)) from error
    model.tie_weights()
    if job.rewards:
        check_head(model, job.model)
    return cast(nn.Module, model)


def model_class(job: Job, config: PreTrainedConfig) -> Any:
    """The auto class of transformers that loads the job's model, whose config is `config`, with the head that the job
    trains."""
    if job.rewards:
        return AutoModelForSequenceClassification
    return AutoModelForSeq2SeqLM if is_encoder_decoder(config) else AutoModelForCausalLM


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """A context in which new modules get parameters on meta. Their buffers stay on the device where they are made."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # A parameter that is on meta already may be a tied one: it must stay the same object.
        if parameter is None or parameter.is_meta:
            return None
        meta = cast(Any, type(parameter))(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        return cast(nn.Parameter, meta)

    handle = register_module_parameter_registration_hook(cast(Callable[..., None], to_meta))
    try:
        yield
    finally:
        handle.remove()


def sample_batch(job: Job, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """A micro-batch of the largest shape that the job can have: `input_ids` and `labels`, zeros [rows, max_length],
    int64. If documents are packed, `position_ids` [rows, max_length] has two documents in each row. For an
    encoder-decoder the labels are [rows, most_target_tokens]. For it, and if the loss includes that of a mixture's
    routers, there is an `attention_mask` in which each row ends with padding. With preferences a pair is two rows, and
    there is what their loss needs besides (`planner.models.preference_loss`)."""
    shape = (job.tensor_rows, job.max_length)
    mask = torch.ones(shape, dtype=torch.int64)
    mask[:, -1] = 0
    if model is not None and has_pairs(model):
        labels = torch.zeros((job.slice_rows, job.most_target_tokens), dtype=torch.int64)
        return {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "labels": labels}
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")}
    if model is not None and weighs_routers(job, cast(Any, model).config):
        batch["attention_mask"] = mask
    if job.refers:
        batch[REFERENCE] = torch.zeros(job.tensor_rows)
    if job.preference == "kto":
        batch[DESIRABLE] = torch.ones(job.slice_rows, dtype=torch.int64)
    if job.packing is True:
        first = torch.arange(job.max_length // 2)
        batch["position_ids"] = torch.cat((first, torch.arange(job.max_length - len(first)))).repeat(job.slice_rows, 1)
    return batch


def _unusable(model: str, cause: str) -> UserError:
    return UserError(
        f"{model} cannot be used as a model: {cause}", code="model-not-usable", hint=_HINT, exit_code=Exit.USAGE
    )
