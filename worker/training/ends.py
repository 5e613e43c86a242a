"""Sets the tokens at which a trained model stops: those of its base, and those that it was taught to end with.

transformers' `generate` and servers stop at the tokens that `generation_config` names. In a base model these are not
the tokens with which a chat template ends answers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from planner.job.pins import revision_of
from planner.job.schema import Job
from planner.models.encoder_decoder import has_pairs
from planner.models.hf_model import model_config
from worker.data.batches import Batches
from worker.training.model import tell_special_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The ids of end tokens: those that the data teach (`taught`, see `worker.data.ends`), and those at which the model
    stopped before training (`before`)."""

    taught: tuple[int, ...]
    before: tuple[int, ...]
    is_known: bool = True
    """Whether the taught end tokens are known; for an encoder-decoder they are not."""

    @property
    def new(self) -> tuple[int, ...]:
        """The ids of the taught end tokens at which the model did not stop before training."""
        return tuple(end for end in self.taught if end not in self.before)

    @property
    def every(self) -> tuple[int, ...]:
        """The ids of all tokens at which the trained model stops, the taught ones first."""
        return tuple(dict.fromkeys((*self.taught, *self.before)))

    def note(self, job: Job, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """A text for the log if the trained model stops at other tokens than before, or if the data teach it no end
        token; else None."""
        if job.rewards:  # a reward model writes no text that could end
            return None
        if not self.taught and self.is_known:
            return (
                "nothing that is learned ends with an end token, so the model is not taught to stop: end answers with "
                f"{tokenizer.eos_token or 'one'}, or give a chat_template that does"
            )
        if not self.new:
            return None
        before = f"it stops at {_names(self.before, tokenizer)}" if self.before else "it names no end token"
        hint = f"; peft does not read the file, so give its generate {self._given}" if job.method == "lora" else ""
        return (
            f"what is learned ends with {_names(self.new, tokenizer)}, where the model does not stop ({before}): "
            f"{GENERATION_CONFIG_NAME} of the trained model names {_names(self.every, tokenizer)}{hint}"
        )

    def line(self, job: Job, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """A sentence in Markdown for the README.md of the model, if it stops at new tokens; else None."""
        if not self.new:
            return None
        text = f"The model was taught to end with {_names(self.new, tokenizer, '`')}"
        if job.method == "lora":
            return f"{text}. Its base does not stop there: give `generate` `{self._given}`."
        return f"{text}. `{GENERATION_CONFIG_NAME}` names {_names(self.every, tokenizer, '`')}: generation stops there."

    @property
    def _given(self) -> str:
        return f"eos_token_id={[*self.every]}"


def tell_ends(job: Job, model: nn.Module, tokenizer: PreTrainedTokenizerBase, batches: Batches) -> Ends:
    """Make the job's `model` stop at the job's `special_tokens` and at the tokens that the data teach it to end with.
    Logs which are new. Returns the end tokens."""
    if job.rewards:
        tell_special_tokens(job, model, tokenizer)
        return Ends(taught=(), before=(), is_known=False)
    before = ends_of_model(model)
    tell_special_tokens(job, model, tokenizer)
    # An encoder-decoder ends with its tokenizer's end token from the start.
    pairs = has_pairs(model)
    ends = Ends(taught=() if pairs else batches.ends, before=before, is_known=not pairs)
    if (note := ends.note(job, tokenizer)) is not None:
        log.warning("data: %s", note)
        name_ends(model, ends.every, tokenizer)
    return ends


def ends_of_files(job: Job) -> tuple[int, ...]:
    """The ids of the tokens at which the job's model stops, read from its files. Raises UserError for a model that
    cannot be used."""
    try:
        generation = GenerationConfig.from_pretrained(job.model, trust_remote_code=False, revision=revision_of(job))
    except Exception:  # it is missing or broken; transformers then makes one from the config
        generation = None
    return _ends_in(generation, model_config(job))


def ends_of_model(model: nn.Module) -> tuple[int, ...]:
    """The ids of the tokens at which the loaded `model`, with adapters or without, stops."""
    writer = _writer(model)
    return _ends_in(writer.generation_config, writer.config)


def name_ends(model: nn.Module, ends: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Make `model`, with adapters or without, stop generating at `ends` (token ids), by its generation config."""
    writer = _writer(model)
    config = writer.generation_config
    config.eos_token_id = [*ends]
    config._original_object_hash = hash(config)  # else a base whose own file has faults could not be saved
    align_config(writer.config, config, tokenizer)


def take_ends(model: nn.Module, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make `model`, a base with adapters, stop at the tokens named by the generation config beside the adapters in
    `folder`, if there is one."""
    if ends := ends_in_folder(folder):
        name_ends(model, ends, tokenizer)


def ends_in_folder(folder: Path) -> tuple[int, ...]:
    """The end tokens (ids) that the generation config in `folder` names; empty where there is no such file."""
    file = folder / GENERATION_CONFIG_NAME
    return _listed(json.loads(file.read_text("utf-8")).get("eos_token_id")) if file.is_file() else ()


def align_config(config: PreTrainedConfig, generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokenizer's end token into a model's `config` where its generation config names it. It replaces another
    end token, or goes before a list of them, as with transformers' `align_special_tokens`."""
    text, eos = config.get_text_config(), tokenizer.eos_token_id
    present = getattr(text, "eos_token_id", None)
    if eos in _listed(generation.eos_token_id) and eos not in _listed(present):
        text.eos_token_id = [eos, *present] if isinstance(present, list) else eos


def _ends_in(generation: Any, config: PreTrainedConfig) -> tuple[int, ...]:
    named = getattr(generation, "eos_token_id", None)
    return _listed(getattr(config.get_text_config(), "eos_token_id", None) if named is None else named)


def _listed(ids: int | list[int] | None) -> tuple[int, ...]:
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


def _names(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, quote: str = "") -> str:
    tokens = cast(list[str | None], tokenizer.convert_ids_to_tokens([*ids]))
    return ", ".join(f"{quote}{token or number}{quote}" for number, token in zip(ids, tokens, strict=True))


def _writer(model: nn.Module) -> Any:
    """The module of the model that generates text."""
    from planner.measure.forward_bytes import generator  # late: it loads the tracer

    return generator(model)
