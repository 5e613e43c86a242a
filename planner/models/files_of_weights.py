"""Finds out whether weights can be read directly from a model's files, bit by bit, and measures how fast."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from planner.cpu.direct import read_rate, room
from planner.job.pins import revision_of
from planner.job.schema import Job
from planner.keys.adapter import takes_from_base
from planner.keys.lora import has_no_weights
from planner.models.hf_model import model_config, working_dtype
from planner.models.quantized import unpacks

_MEMORY_BYTES = 64 * 2**20


def why_not_in_files(job: Job, model: nn.Module, *, runs: bool = True) -> str | None:
    """Why the files of the job's model do not hold its weights bit by bit, in words for the log; None if they do. If
    they do, weights are mapped from the files; otherwise they are made in memory when they are loaded. Weights of
    adapters do not count: they are in no file, and small.

    `runs`: whether the job is to run. If the question is only about its plan, a folder may have a config without
    weights.
    """
    dtype = working_dtype(job)
    if takes_from_base(job.init_lora_weights):
        return "adapters take over a part of them"
    if job.method == "lsp":
        return "method: lsp changes them"
    if runs and has_no_weights(job.model):
        return "there are none: they begin random"
    base = [p for p in model.parameters() if job.method == "full" or not p.requires_grad]
    if any(p.dim() > 2 for p in base):
        return "those of experts are put together"
    config = model_config(job)
    published = getattr(config, "dtype", None)
    if unpacks(config) or any(p.dtype != dtype for p in base):
        return "they are quantized or unpacked"
    if job.add_tokens:
        rows = cast(Any, model).get_input_embeddings().num_embeddings
        if rows != config.get_text_config().vocab_size:
            return "rows are added to them for tokens"
    if published != dtype:
        return f"they are in {_name(published)}, and loaded as {_name(dtype)}"
    return None


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.") if dtype is not None else "a dtype that is not named"


def model_read_rate(job: Job) -> float:
    """Measures the bytes per second at which the model's files are read from disk; 0.0 if they are not on this machine
    yet."""
    memory = torch.frombuffer(mmap.mmap(-1, room(_MEMORY_BYTES)), dtype=torch.uint8)
    try:
        return read_rate(sorted(model_folder(job).glob("*.safetensors")), memory)
    except OSError:
        return 0.0


def model_folder(job: Job) -> Path:
    """The local folder of the model's files. Raises OSError if the model is a name on the hub that
    was not downloaded."""
    if (folder := Path(job.model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(job.model, revision=revision_of(job), local_files_only=True))


def entries_of(file: Path) -> tuple[dict[str, Any], int]:
    """Reads the header of a safetensors file. Returns weight's name -> its entry (dtype, shape, offsets), and the byte
    at which the first weight begins."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        entries = json.loads(content.read(length))
    entries.pop("__metadata__", None)
    return entries, 8 + length
