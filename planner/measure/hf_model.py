"""The Hugging Face causal language model of a job: its config, and the model itself without memory for its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from planner.errors import Exit, UserError, first_line
from planner.job.schema import Job
from planner.measure.peft_lora import with_adapters

_HINT = "give a folder with config.json, or the id of a causal language model on huggingface.co"


def model_config(job: Job) -> PreTrainedConfig:
    """The config of `job.model`, for training: no cache. Raises UserError."""
    folder = Path(job.model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise _unusable(job, "the folder has no config.json")
    try:
        config = AutoConfig.from_pretrained(job.model)
    except (OSError, ValueError, KeyError) as error:
        raise _unusable(job, first_line(error)) from error
    config.use_cache = False
    return cast(PreTrainedConfig, config)


def beyond_positions(job: Job) -> str | None:
    """What to say of rows that are longer than the positions the model's config names; None of others. Models with a
    table of positions cannot have them, and are refused when their blocks are looked for."""
    most = getattr(model_config(job).get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int) or job.max_length <= most:
        return None
    return (
        f"max_length {job.max_length} is beyond the {most} positions that the model is made for "
        "(max_position_embeddings): it runs, as it does in transformers, but knows no rows this long."
    )


def working_dtype(job: Job) -> torch.dtype:
    """The dtype of the weights that compute and travel."""
    return torch.bfloat16 if job.bf16 else torch.float32


def skeleton_model(job: Job, device: torch.device | str = "cpu") -> nn.Module:
    """The job's model in training mode: parameters on meta (no memory, no initialization), buffers real, on `device`.

    It has adapters for LoRA. Weights are tied as the config says. Raises UserError.
    """
    config = model_config(job)
    with without_weights(), torch.device(device):
        model = build_model(job, config)
        if job.method == "lora":
            model = with_adapters(model, job)
    return model.train()


def build_model(job: Job, config: PreTrainedConfig) -> nn.Module:
    """The job's model class made from `config`, initialized by its own code. Raises UserError."""
    # Asked for by name, sdpa is refused by models that have only eager; left open, it is taken where there is one.
    attention = None if job.attn_implementation == "sdpa" else job.attn_implementation
    make = cast(Callable[..., nn.Module], AutoModelForCausalLM.from_config)
    try:
        model = make(config, dtype=working_dtype(job), attn_implementation=attention)
    except (ValueError, KeyError, ImportError) as error:
        raise _unusable(job, first_line(error)) from error
    cast(Any, model).tie_weights()
    return model


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Modules made inside have their parameters on meta, and their buffers where they were made."""

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


def sample_batch(job: Job) -> dict[str, torch.Tensor]:
    """A slice of the largest shape the job can have: `input_ids` and `labels`, zeros [rows, max_length], int64."""
    shape = (job.slice_rows, job.max_length)
    return {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")}


def _unusable(job: Job, cause: str) -> UserError:
    return UserError(
        f"{job.model} cannot be used as a model: {cause}", code="model-not-usable", hint=_HINT, exit_code=Exit.USAGE
    )
