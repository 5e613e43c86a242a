"""Freezes the weights that a job leaves out of full fine-tuning (`trainable`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, cast

from torch import nn

from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.keys.patterns import SIMPLER, too_slow
from planner.keys.trainable import PLACE
from planner.models.tokenizer import load_tokenizer
from planner.units import counted


def freeze_others(model: nn.Module, job: Job, *, layers: int | None = None) -> None:
    """Freeze all parameters of `model` except those whose names match a pattern in `job.trainable` from the beginning,
    and the cores of LSP.
    A tied parameter goes by its first name. `layers`: the number of layers of the whole model if `model` has only the
    first ones; then patterns may be about the others.

    Raises UserError for a pattern that matches no parameter, if no parameter is left to train, and, with adapters, for
    patterns that match other parameters than the adapters'.
    """
    if not job.trainable:
        return
    if job.method == "lora":
        _check_adapters_alone(model, job)
        return
    count = layers or _layers_of(model)
    chosen = "|".join(map(str, _layers(job, count)))
    patterns = {text: re.compile(text.replace(PLACE, f"(?:{chosen})")) for text in job.trainable}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    tied = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != name}
    names = list(first.values())
    check_patterns(job.trainable, (pattern.pattern for pattern in patterns.values()), (*names, *tied))
    for text, pattern in patterns.items():
        if layers is None and not any(map(pattern.match, names)):
            other = next((f"{name} is tied: give {tied[name]}" for name in filter(pattern.match, tied)), None)
            numbers = (f"trainable: {text}", f"some that it has: {', '.join(names[:1] + names[-2:])}")
            raise UserError(
                "A pattern in trainable matches no parameter of this model.",
                code="trainable-not-there",
                exit_code=Exit.USAGE,
                numbers=numbers,
                hint=other or "a pattern is to match a name from its beginning: 'model.layers.1[0-5].', or '.*mlp'",
            )
    cores = {name for name, parameter in model.named_parameters() if job.method == "lsp" and parameter.requires_grad}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in cores or any(pattern.match(name) for pattern in patterns.values()))
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    if layers is not None:
        raise none_kept(model, layers)
    raise UserError(
        "Nothing of this model would be trained.",
        code="trainable-not-there",
        exit_code=Exit.USAGE,
        numbers=(f"trainable: {', '.join(job.trainable)}",),
        hint="an embedding that is the head, too, goes by the embedding's name",
    )


def _check_adapters_alone(model: nn.Module, job: Job) -> None:
    """Raise UserError if the patterns match other parameters than those that the adapters train. As in axolotl,
    patterns match the names in peft's model."""
    patterns = [re.compile(text) for text in job.trainable or ()]
    parameters = dict(model.named_parameters())
    check_patterns(job.trainable or (), job.trainable or (), parameters)
    meant = {name for name in parameters if any(pattern.match(name) for pattern in patterns)}
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    if meant == trained:
        return
    more, less = sorted(meant - trained), sorted(trained - meant)
    what = (
        "With LoRA, no weights of the model itself can be trained: a file of adapters cannot hold them."
        if more
        else "LoRA cannot train some adapters and freeze others."
        if meant
        else "The patterns match no adapter: names of adapters begin with base_model.model."
    )
    raise UserError(
        what,
        code="trainable-beside-adapters",
        exit_code=Exit.USAGE,
        numbers=(
            f"trainable (unfrozen_parameters): {', '.join(job.trainable or ())}",
            f"it matches {more[0]}" if more else f"it does not match {less[0]}",
        ),
        hint="leave it out, or give ['.+lora_']; lora_target_modules says which layers get adapters",
    )


def check_patterns(as_written: Iterable[str], patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise UserError if one of the regular expressions `patterns` takes too long to match the `names` of a model's
    modules or parameters. `as_written`: each pattern as the job has it, for the error."""
    known = dict(zip(patterns, as_written, strict=True))
    if (slow := too_slow(known, names)) is not None:
        raise UserError(
            "A pattern takes too long to match the names of this model.",
            code="pattern-too-slow",
            exit_code=Exit.USAGE,
            numbers=(known[slow],),
            hint=SIMPLER,
        )


def none_kept(model: nn.Module, layers: int) -> UserError:
    """Makes the error for a `model` that has only some of its `layers` layers, none of which the job trains."""
    kept_layers = _layers_of(model)
    return UserError(
        "--layers leaves out every layer that this job trains.",
        code="layers-left-out",
        exit_code=Exit.USAGE,
        numbers=(f"here {kept_layers} of {counted(layers, 'layer')}",),
        hint=f"--layers {layers}, or a number high enough to include a trained layer",
    )


def check_tokens_learned(model: nn.Module, job: Job, rows: int) -> None:
    """Raise UserError if the job adds tokens to an embedding or a head that it freezes, so that their rows would never
    be trained; LoRA is checked elsewhere. `rows`: the embedding's rows before tokens were added."""
    if job.method == "lora" or not job.add_tokens or (job.method == "full" and not job.trainable):
        return
    vocabulary = load_tokenizer(job.model_copy(update={"add_tokens": None, "special_tokens": None})).get_vocab()
    if all(vocabulary.get(token, rows) < rows for token in job.add_tokens):
        return
    its = cast(Any, model)
    ends = [end.weight for end in (its.get_input_embeddings(), its.get_output_embeddings()) if end is not None]
    if frozen := [
        name for name, p in model.named_parameters() if not p.requires_grad and any(p is end for end in ends)
    ]:
        raise UserError(
            "Tokens are added, and frozen weights would never learn them.",
            code="tokens-not-learned",
            exit_code=Exit.USAGE,
            numbers=(f"add_tokens: {', '.join(job.add_tokens)}; frozen: {', '.join(frozen)}",),
            hint=f"trainable: [{', '.join(frozen)}, …], or without add_tokens",
        )


def _layers_of(model: nn.Module) -> int:
    return int(cast(Any, model).config.get_text_config().num_hidden_layers)


def _layers(job: Job, count: int) -> range:
    """The numbers of the layers that the job trains: the last `trainable_layers` of `count`, or the first if that is
    negative."""
    wanted = job.trainable_layers
    if wanted is None:
        return range(0)
    return range(max(0, count - wanted), count) if wanted > 0 else range(min(-wanted, count))
