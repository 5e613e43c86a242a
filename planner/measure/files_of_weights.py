"""The files of a model's weights: whether weights can be read from them as they are, and how fast."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from planner.cpu.direct import read_rate, room
from planner.job.adapter import takes_from_base
from planner.job.lora import has_no_weights
from planner.job.schema import Job
from planner.measure.hf_model import model_config, working_dtype
from planner.measure.hf_names import revision_of
from planner.measure.quantized import unpacks

_MEMORY_BYTES = 64 * 2**20


def weights_are_in_files(job: Job, model: nn.Module) -> bool:
    """Whether the files of the job's model have its weights bit by bit: published in the dtype that they are used in,
    and neither put together when they are loaded, as those of experts are, nor quantized, nor given rows for tokens
    that the job adds, nor without what adapters take over."""
    dtype = working_dtype(job)
    still = [p for p in model.parameters() if not p.requires_grad]
    if takes_from_base(job.init_lora_weights):
        return False
    if has_no_weights(job.model) or any(p.dim() > 2 or p.dtype != dtype for p in still):
        return False
    config = model_config(job)
    if job.add_tokens:
        rows = cast(Any, model).get_input_embeddings().num_embeddings
        if rows != config.get_text_config().vocab_size:
            return False
    return getattr(config, "dtype", None) == dtype and not unpacks(config)


def model_read_rate(job: Job) -> float:
    """Bytes a second at which the model's files are read, measured; 0.0 where they are not on this machine yet."""
    memory = torch.frombuffer(mmap.mmap(-1, room(_MEMORY_BYTES)), dtype=torch.uint8)
    try:
        return read_rate(sorted(_folder(job).glob("*.safetensors")), memory)
    except OSError:
        return 0.0


def _folder(job: Job) -> Path:
    """Raises OSError where it is a name of the hub's that was not downloaded."""
    if (folder := Path(job.model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(job.model, revision=revision_of(job), local_files_only=True))
