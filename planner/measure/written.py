"""The dtype that a trained model is written in: its base's, unless the job asks for another."""

from __future__ import annotations

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from planner.job.schema import Job
from planner.measure.files_of_weights import model_folder
from planner.measure.hf_model import model_config, working_dtype

_WRITTEN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def written_dtype(job: Job) -> torch.dtype:
    """What the weights are written in: adapters in fp32; a model that is trained as a whole in `save_dtype`, or else in
    the dtype that its base is published in, which transformers loads it in. Raises UserError."""
    if job.method == "lora":
        return torch.float32
    if job.save_dtype is not None:
        found: torch.dtype = getattr(torch, job.save_dtype)
        return found
    return _published(job) or working_dtype(job)


def said_of_dtype(job: Job) -> str | None:
    """What to say of a model trained as a whole that is written in another dtype than it computes in, or than its base
    is published in; None of others. Raises UserError."""
    if job.method == "lora":
        return None
    published, computes, written = _published(job), working_dtype(job), written_dtype(job)
    if {published or written, computes} == {written}:
        return None
    base = "" if published is None else f"the base is published in {_name(published)}; "
    rounds = published not in (None, computes) and computes.itemsize <= (published or computes).itemsize
    rounded = ", to which its weights are rounded first" if rounds else ""
    asked = "save_dtype" if job.save_dtype is not None else "as the base; save_dtype asks for another"
    text = f"{base}the model is trained in {_name(computes)}{rounded}, and written in {_name(written)} ({asked})."
    return text[0].upper() + text[1:]


def _published(job: Job) -> torch.dtype | None:
    """What transformers loads the base in: the dtype that its config names, or else that of the first weight in its
    files; None where neither says."""
    config: PreTrainedConfig = model_config(job)
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if named is not None:
        return named if named in _WRITTEN.values() else None
    try:
        for file in sorted(model_folder(job).glob("*.safetensors")):
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118, it is no mapping
                    if (dtype := weights.get_slice(name).get_dtype()) in _WRITTEN:
                        return _WRITTEN[dtype]
    except (OSError, SafetensorError):  # not downloaded yet, or damaged, which loading tells
        pass
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
