"""The folder a job ends with: weights in the working dtype, configs, tokenizer; loadable by `from_pretrained`.

That of LoRA has adapters instead of weights, in peft's form, loadable by `PeftModel.from_pretrained`.

It is written beside and renamed when every byte is on disk. Weights pass through files in the folder, so memory holds
no second copy of the model; transformers' own `save_pretrained` then gives them the names, shards and index that
`from_pretrained` expects.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from planner.job.output_dir import MARK
from worker.storage.shards import check_space, read_shards, sync, sync_tree, write_shards

log = logging.getLogger(__name__)


class Output:
    """Where a run's model goes, and what it needs to know of the model before an engine takes its weights away."""

    def __init__(self, folder: Path, *, run: str, model: nn.Module) -> None:
        """`folder` is replaced whatever is in it (see `planner.job.output_dir`); `run` names the run in it."""
        self.folder = folder
        self._run = run
        self._first: dict[str, str] = {}  # every name of a parameter -> its first
        seen: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._first[name] = seen.setdefault(id(parameter), name)
        self._adapters = hasattr(model, "peft_config")
        self.weight_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad or not self._adapters)

    @property
    def needed_bytes(self) -> int:
        """About what writing takes on the disk, the passing copy of the weights included."""
        return 2 * self.weight_bytes + 2**24

    def write(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        state: Iterable[tuple[str, Mapping[str, Tensor]]],
        *,
        step: int,
        dtype: torch.dtype,
    ) -> Path:
        """Write the model folder from the masters in `state`, rounded to `dtype`. Returns its path.

        `model` gives the structure, buffers and configs, and the parameters that `state` does not have: those that an
        engine took away must be in it, the frozen ones too. Of LoRA only the adapters are written.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        check_space(self.folder.parent, self.needed_bytes, "the trained model")
        temporary = self.folder.with_name(f".{self.folder.name}.tmp")
        staging = self.folder.with_name(f".{self.folder.name}.weights")
        for leftover in (temporary, staging):
            shutil.rmtree(leftover, ignore_errors=True)
            leftover.mkdir()
        rounded: Iterator[tuple[str, dict[str, Tensor]]] = (
            (name, {"weight": parts["master"].to(dtype)}) for name, parts in state
        )
        weights = {name: parts["weight"] for name, parts in read_shards(write_shards(staging, "weights", rounded))}
        cast(Any, model).config.use_cache = True  # off for training only
        if self._adapters:
            cast(Any, model).save_pretrained(temporary, state_dict=weights, save_embedding_layers=False)
        else:
            state_dict = self._state_dict(model, weights)
            cast(Any, model).save_pretrained(temporary, state_dict=state_dict, max_shard_size="5GB")
        tokenizer.save_pretrained(temporary)
        (temporary / MARK).write_text(json.dumps({"format": 1, "run": self._run, "step": step}), "utf-8")
        sync_tree(temporary)
        self._replace(temporary)
        del weights
        shutil.rmtree(staging)
        return self.folder

    def _state_dict(self, model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model's state dictionary with the trained weights, tied ones under all their names as one tensor."""
        found = {name: weights.get(self._first.get(name, name), tensor) for name, tensor in model.state_dict().items()}
        taken = [name for name in self._first if name in found and _is_hollow(found[name])]
        assert not taken, f"nobody gave the weights of {taken[0]}"
        return found

    def _replace(self, temporary: Path) -> None:
        """Put `temporary` where the output goes. An earlier output of this run steps aside first."""
        old = self.folder.with_name(f".{self.folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(old)
        temporary.rename(self.folder)
        sync(self.folder.parent)
        shutil.rmtree(old, ignore_errors=True)


def _is_hollow(tensor: Tensor) -> bool:
    """Has fewer bytes than elements: an engine holds the weights."""
    return tensor.untyped_storage().nbytes() < tensor.nbytes
