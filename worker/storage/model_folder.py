"""Writes the folder a job ends with: weights, configs and tokenizer, loadable by `from_pretrained`.

A LoRA job writes adapters instead of weights, in peft's form, loadable by `PeftModel.from_pretrained`.

The weights come from files and go to files, so memory holds no second copy of the model: transformers' own
`save_pretrained` gives them the names, shards and index that `from_pretrained` expects. Where the folder is and how it
gets there is decided by `planner.job.output_dir`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from planner.disk import check_space
from planner.job.output_dir import Place
from planner.job.room import FILES_BYTES

Converted = Callable[[nn.Module, Mapping[str, Tensor]], contextlib.AbstractContextManager[Mapping[str, Tensor]]]
"""Takes the model and the trained weights and gives, as a context manager, the weights to write. While it is open, the
model's configs describe these."""


class Output:
    """Writes the model folder with which a job ends. Make this object before an engine takes over the model's weights:
    it notes their names and dtypes."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        *,
        converted: Converted | None = None,
        stops: bool = False,
        added: Collection[str] = (),
    ) -> None:
        """`dtype`: the dtype in which weights are written. Weights that the model keeps wider than its narrowest, such
        as some routers in fp32, keep their own dtype. `converted`: for adapters that are written in another form, of
        twice the rank. `stops`: the model stops at other tokens than its base; a generation config is then written
        beside adapters, too. `added`: the names of parameters that are no part of the written model."""
        self._first: dict[str, str] = {}  # every name of a parameter -> its first
        seen: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._first[name] = seen.setdefault(id(parameter), name)
        self._adapters = hasattr(model, "peft_config")
        self._converted, self._stops = converted, stops
        self._added = frozenset(added)
        written = {
            n: p
            for n, p in model.named_parameters()
            if (p.requires_grad or not self._adapters) and n not in self._added
        }
        narrowest = min((p.dtype.itemsize for p in written.values()), default=0)
        self.dtypes = {n: p.dtype if p.dtype.itemsize > narrowest else dtype for n, p in written.items()}
        """Name of each tensor that is written -> its dtype; without adapters the frozen tensors are written, too."""
        weight_bytes = sum(self.dtypes[name].itemsize * p.numel() for name, p in written.items())
        self.weight_bytes = weight_bytes if converted is None else 2 * weight_bytes

    def write(
        self,
        place: Place,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        weights: Mapping[str, Tensor],
        *,
        run: str,
        step: int,
        card: str | None = None,
    ) -> Path:
        """Write the model folder at `place` from the trained `weights` (name -> values in the folder's dtype), with
        `card` as its README.md. Returns its path. `run` and `step` say which run, after which step, made it.

        `model` gives the structure, buffers and configs, and the parameters that `weights` lacks. Every weight that an
        engine took away from the model, frozen ones included, must therefore be in `weights`. For LoRA only adapters
        are written. Raises OSError, UserError, or what a library makes of a full disk; then nothing is left behind."""
        draft = place.begin()
        try:
            check_space(draft, self.weight_bytes + FILES_BYTES, "the trained model")
            cast(Any, model).config.use_cache = True  # off for training only
            if self._adapters:
                self._write_adapters(draft, cast(Any, model), weights)
            else:
                state_dict = self._state_dict(model, weights)
                cast(Any, model).save_pretrained(draft, state_dict=state_dict, max_shard_size="5GB")
                _name_dtype(cast(Any, model).config, weights)
                cast(Any, model).config.save_pretrained(draft)  # save_pretrained named the dtype of the computation
            tokenizer.save_pretrained(draft)
            if card is not None:
                (draft / "README.md").write_text(card, "utf-8")
            place.finish(draft, run=run, step=step)
        except BaseException:
            with contextlib.suppress(OSError):
                place.clear()
            raise
        return place.folder

    def _write_adapters(self, folder: Path, model: Any, weights: Mapping[str, Tensor]) -> None:
        form = contextlib.nullcontext(weights) if self._converted is None else self._converted(model, weights)
        with form as written:
            model.save_pretrained(folder, state_dict=dict(written), save_embedding_layers=False)
        if self._stops:
            model.get_base_model().generation_config.save_pretrained(folder)

    def write_files(self, folder: Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the model's configs and the tokenizer, but no weights, into `folder`. Raises what transformers
        raises."""
        untyped = cast(Any, model)
        configs = [*untyped.peft_config.values()] if self._adapters else [untyped.config]
        if not self._adapters or self._stops:
            # a model that does not write texts has none
            configs.append(getattr(untyped.get_base_model() if self._adapters else untyped, "generation_config", None))
        for config in configs:
            if config is not None:
                config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _state_dict(self, model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's state dictionary with the trained weights. A tied weight is one tensor under all its names."""
        state_dict = {
            name: weights.get(self._first.get(name, name), tensor)
            for name, tensor in model.state_dict().items()
            if name not in self._added
        }
        taken = [name for name in self._first if name in state_dict and _is_hollow(state_dict[name])]
        assert not taken, f"nobody gave the weights of {taken[0]}"
        return state_dict


def _name_dtype(config: Any, weights: Mapping[str, Tensor]) -> None:
    """Set the `config`'s dtype to the one that most of the weights are written in: they are loaded in it later."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in weights.values():
        elements[tensor.dtype] += tensor.numel()
    ((dtype, _),) = elements.most_common(1)
    for its in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if its is not None:
            its.dtype = dtype


def _is_hollow(tensor: Tensor) -> bool:
    """Whether the tensor's storage is smaller than the tensor: then an engine holds the weights."""
    return tensor.untyped_storage().nbytes() < tensor.nbytes
