"""Finds the dtype in which a trained model is saved: that of the published model, unless the job asks for another."""

from __future__ import annotations

import json

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from planner.job.schema import Job
from planner.keys.lora import has_no_weights
from planner.models.files_of_weights import entries_of, model_folder
from planner.models.hf_model import model_config, working_dtype

_WRITTEN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def written_dtype(job: Job) -> torch.dtype:
    """The dtype in which the trained weights are saved: fp32 for adapters; for a model trained as a whole
    `save_dtype`, else the dtype in which the model was published. Raises UserError."""
    if job.method == "lora":
        return torch.float32
    if job.save_dtype is not None:
        dtype: torch.dtype = getattr(torch, job.save_dtype)
        return dtype
    if (published := published_dtype(job)) is not None:
        return published
    return working_dtype(job) if has_no_weights(job.model) else torch.float32


def said_of_dtype(job: Job) -> str | None:
    """A note for the user if the job computes in another dtype than the model was published in, or saves the model in
    another dtype; None if all are the same. Raises UserError."""
    published, computes, written = published_dtype(job), working_dtype(job), written_dtype(job)
    if published in (None, computes) and (job.method == "lora" or written == computes):
        return None
    sentences = [] if published in (None, computes) else [f"The base is published in {_name(published)}."]
    if published in (torch.float32, torch.float16) and computes == torch.bfloat16:
        sentences.append(f"Its weights are rounded to {_name(computes)}, in which the model computes.")
    else:
        sentences.append(f"The model computes in {_name(computes)}.")
    if job.method != "lora":
        because = "like its base" if published is not None else "as the base names no dtype"
        because = "save_dtype" if job.save_dtype else f"{because}; save_dtype asks for another"
        sentences.append(f"The trained model is written in {_name(written)} ({because}).")
    return " ".join(sentences)


def published_dtype(job: Job) -> torch.dtype | None:
    """The dtype of most bytes of the published model's weights, not counting quantized ones. If its files are not on
    this machine, or are not safetensors, the dtype in its config, or None. Raises UserError."""
    counts = dict.fromkeys(_WRITTEN, 0)
    try:
        folder = model_folder(job)
        names = {SAFE_WEIGHTS_NAME}
        if not (folder / SAFE_WEIGHTS_NAME).is_file():
            names = set(json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text("utf-8"))["weight_map"].values())
        for name in names:
            for entry in entries_of(folder / name)[0].values():
                if entry["dtype"] in counts:
                    start, end = entry["data_offsets"]
                    counts[entry["dtype"]] += end - start
    except (OSError, ValueError, KeyError, TypeError):  # not downloaded yet, or damaged, which loading reports
        pass
    if any(counts.values()):
        return _WRITTEN[max(counts, key=counts.__getitem__)]
    config = model_config(job)
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return named if named in _WRITTEN.values() else None


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
