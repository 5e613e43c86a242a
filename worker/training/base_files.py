"""The files of a base that adapters are merged into, as transformers would load it from them."""

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
"""How files beside those of weights end."""
# Mistral's own form beside that of transformers, the base once more: a server that finds it would take that.
ANOTHER_FORM = ("consolidated*", "params.json")


def base_folder(job: Job) -> Path:
    """The folder of the base, downloaded where it is one of the hub's. Raises UserError."""
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
    """As transformers asks: one file of all weights goes before an index."""
    return not (base / SAFE_WEIGHTS_NAME).is_file() and (base / SAFE_WEIGHTS_INDEX_NAME).is_file()


def weight_files(base: Path) -> list[Path]:
    """The files that transformers loads the base from, and none that lie beside them. Raises UserError."""
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
    """The error for a base whose files have not what is to become another, as `number` says."""
    return UserError(
        "The base has its weights in another form than its layers, and cannot be merged file by file.",
        code="not-mergeable", exit_code=Exit.USAGE, numbers=(number,),
        hint="peft merges in memory: PeftModel.from_pretrained(model, adapters).merge_and_unload()",
    )  # fmt: skip
