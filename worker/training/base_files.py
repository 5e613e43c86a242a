"""Finds the weight files of the base model that adapters are merged into: those from which transformers would load
it."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from planner.errors import Exit, UserError
from planner.hub import not_given
from planner.job.pins import revision_of
from planner.job.schema import Job

BESIDE = (".json", ".jinja", ".txt", ".model")
"""The suffixes of the files beside the weights."""
# Mistral's own form of the base, beside that of transformers: a server that finds it would load the unmerged base.
ANOTHER_FORM = ("consolidated*", "params.json")


def base_folder(job: Job) -> Path:
    """The folder of the job's base model, which is downloaded first if it is on the hub. Raises UserError."""
    if Path(job.model).is_dir():
        return Path(job.model)
    try:
        wanted = ["*.safetensors", *(f"*{end}" for end in BESIDE)]
        return Path(
            snapshot_download(
                job.model, revision=revision_of(job), allow_patterns=wanted, ignore_patterns=list(ANOTHER_FORM)
            )
        )
    except Exception as error:
        if (refused := not_given(f"the weights of {job.model}", error)) is not None:
            raise refused from error
        raise


def is_sharded(base: Path) -> bool:
    """Whether the base model in the folder `base` has its weights in several files. As in transformers, a single file
    takes precedence over an index."""
    return not (base / SAFE_WEIGHTS_NAME).is_file() and (base / SAFE_WEIGHTS_INDEX_NAME).is_file()


def weight_files(base: Path) -> list[Path]:
    """The files from which transformers would load the weights of the base model in the folder `base`, and no others.
    Raises UserError where there are none."""
    names = {SAFE_WEIGHTS_NAME}
    if is_sharded(base):
        try:
            names = set(json.loads((base / SAFE_WEIGHTS_INDEX_NAME).read_text("utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise not_mergeable(f"{base / SAFE_WEIGHTS_INDEX_NAME} is no index of weights") from error
    if missing := sorted(name for name in names if not (base / name).is_file()):
        raise not_mergeable(f"{base} has no {missing[0]}")
    return [base / name for name in sorted(names)]


def not_mergeable(number: str) -> UserError:
    """Make the UserError "not-mergeable", for a base model whose files lack a weight that merging the adapters would
    change; `number` names the weight."""
    return UserError(
        "The base has its weights in another form than its layers, and cannot be merged file by file.",
        code="not-mergeable",
        exit_code=Exit.USAGE,
        numbers=(number,),
        hint="peft merges in memory: PeftModel.from_pretrained(model, adapters).merge_and_unload()",
    )
