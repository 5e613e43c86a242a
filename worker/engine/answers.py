"""Generates text with the model's own greedy `generate`, in which each call of the model runs forward under a program,
as in training."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from planner.measure.forward_bytes import generator, quiet
from planner.models.encoder_decoder import has_pairs
from worker.runtime.machine import Machine, RandomState

RunPass = Callable[[Callable[[int], None], list[RandomState]], None]


def answers(
    model: nn.Module,
    machine: Machine,
    run_pass: RunPass,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    pad: int,
) -> list[list[int]]:
    """Generate greedily after each of `prompts` (lists of token ids), all in one batch padded with the token id `pad`.
    Returns at most `new_tokens` token ids for each prompt. A causal model keeps its key-value cache on the device. An
    encoder-decoder runs without a cache: for each new token the encoder reads the prompts again, and the decoder all
    that it has written."""
    writer, pairs = cast(Any, generator(model)), has_pairs(model)
    ids, mask = (
        machine.stage(t).to(machine.device, copy=True, non_blocking=True) for t in _padded(prompts, pad, left=not pairs)
    )
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if pairs:  # else generate would call the encoder alone; of this stand-in it only looks at the rows
        inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=cast(Any, mask.new_zeros((*mask.shape, 1))))
    with _each_call_a_pass(writer, machine, run_pass, {"input_ids": ids, "encoder_outputs": None} if pairs else {}):
        generated = writer.generate(
            **inputs,
            **quiet(model),
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=not pairs,
            pad_token_id=pad,
        )
    return cast(list[list[int]], generated[:, 1 if pairs else ids.shape[1] :].tolist())


@contextlib.contextmanager
def _each_call_a_pass(
    model: nn.Module, machine: Machine, run_pass: RunPass, instead: dict[str, Tensor | None]
) -> Iterator[None]:
    """A context in which each call of `model` is a pass of one slice under the program. The arguments `instead` replace
    those that `generate` gives."""
    own_forward = model.forward
    before = model.__dict__.get("forward")

    @functools.wraps(own_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        results: list[Any] = []
        run_pass(lambda k: results.append(own_forward(*args, **{**kwargs, **instead})), [machine.random_state()])
        return results.pop()

    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if before is not None:
            model.__dict__["forward"] = before


def _padded(prompts: Sequence[Sequence[int]], pad: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask [prompts, longest]. `left`: padded on the left, so that new tokens can follow."""
    longest = max(map(len, prompts))

    def row(tokens: list[int], filler: int) -> list[int]:
        filling = [filler] * (longest - len(tokens))
        return filling + tokens if left else tokens + filling

    return (
        torch.tensor([row(list(prompt), pad) for prompt in prompts]),
        torch.tensor([row([1] * len(prompt), 0) for prompt in prompts]),
    )
