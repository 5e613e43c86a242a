"""Tests whether a model keeps documents apart that are packed into one row: it runs two documents in one row, and each
alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from planner.errors import Exit, UserError, first_line
from planner.graph import BlockNames, flatten_call
from planner.job.schema import Job
from planner.models.hf_model import build_model, model_config, without_weights

_DOCUMENTS = 6, 10  # tokens
_REACH = 4  # tokens: fewer than a document has
_REACHES = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "window_size",
    "keep_window_size",
    "local_attention",
    "attention_chunk_size",
    "index_topk",
    "floor_scale",
    "log_scaling_n_floor",
)
"""Keys of transformers' configs for the number of tokens that a layer looks back at, picks, or counts before it scales
them."""
_WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
"""Endings of config keys for a layer's inner width, which can change without anything else."""
_WIDTH = 16
_ROUNDING = 1e-4  # relative to the largest number; fp32 rounding is some 1e-6, seeing another document far more
_SEEDS = (0, 1)  # a difference by rounding alone, such as a tie in a router, does not occur under both


def check_isolation(job: Job, names: BlockNames) -> None:
    """Raise UserError "packing-not-isolated" if the model gives other results for a document in a row of two than for
    the document alone.

    The test runs on the CPU, in fp32 and with random weights, on a model of the job's own config with two changes:
    layers are narrower inside, and attention windows that are shorter than the job's rows become shorter still.
    `names`: the model's blocks. Of blocks of one kind that get the same mask only one runs.
    """
    config = _little(model_config(job), job.max_length)
    with without_weights(), torch.device("cpu"):
        model = build_model(job, config, torch.float32).eval()
    prefix = "base_model.model."  # of a model with adapters
    blocks = {name.removeprefix(prefix): kind for name, kind in zip(names.all, names.kinds, strict=True)}
    try:
        for seed in _SEEDS:
            if (difference := _difference(model, blocks, seed)) <= _ROUNDING:
                return
    except Exception as error:  # the model's own code, which may not know position_ids
        cause = f"it cannot be tried: {type(error).__name__}: {first_line(error)}"
    else:
        cause = f"two documents in a row give other numbers than each alone, by {difference:.1e} of the largest"
    raise UserError(
        "The model does not keep packed documents apart.",
        code="packing-not-isolated",
        exit_code=Exit.USAGE,
        numbers=(f"{type(model).__name__}: {cause}",),
        hint="use packing: false, or packing: wrapped, in which documents see each other",
    )


def _little(config: PreTrainedConfig, max_length: int) -> PreTrainedConfig:
    text = config.get_text_config()
    for key, value in text.to_dict().items():
        if key in _REACHES and isinstance(value, int):
            setattr(text, key, _REACH if value < max_length else max(value, sum(_DOCUMENTS)))
        elif key.endswith(_WIDTHS) and isinstance(value, int) and value > _WIDTH:
            setattr(text, key, _WIDTH)
        elif key.endswith(_WIDTHS) and isinstance(value, (list, tuple)):
            setattr(text, key, [_WIDTH] * len(value))
    config._experts_implementation = "eager"  # kernels of other implementations need weights that do not share memory
    return config


@torch.no_grad()
def _difference(model: nn.Module, blocks: Mapping[str, str], seed: int) -> float:
    """How far the head's input differs between documents in one row and alone, relative to its largest number."""
    generator = torch.Generator().manual_seed(seed)
    _fill(model, generator)
    rows = cast(Any, model).get_input_embeddings().num_embeddings
    documents = [torch.randint(rows, (1, length), generator=generator) for length in _DOCUMENTS]
    positions = [torch.arange(length)[None] for length in _DOCUMENTS]
    together = _run(model, blocks, torch.cat(documents, 1), torch.cat(positions, 1))
    alone = torch.cat([_run(model, blocks, *document) for document in zip(documents, positions, strict=True)], 1)
    return float((together - alone).abs().max() / alone.abs().max())


def _fill(model: nn.Module, generator: torch.Generator) -> None:
    """Fill all weights with the same few random numbers. Each row of a weight begins one number after the row before,
    so that a weight of a billion elements takes the memory of thousands."""
    numbers = torch.randn(max(sum(p.shape) for p in model.parameters()), generator=generator)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            scale = math.sqrt(p.shape[-1]) if p.ndim > 1 else 2.0
            weight = (numbers[: sum(p.shape)] / scale).as_strided(p.shape, (1,) * p.ndim)
            setattr(module, name, nn.Parameter(weight, requires_grad=False))


def _run(model: nn.Module, blocks: Mapping[str, str], ids: Tensor, positions: Tensor) -> Tensor:
    """The head's input for one row of tokens `ids` [1, length] at `positions`."""
    head_inputs: list[Tensor] = []
    ran: set[object] = set()
    last: list[object] = []

    def once(original: Callable[..., object], kind: str) -> Callable[..., object]:
        def forward(*args: Any, **named: Any) -> object:
            _, *others = flatten_call(args, named)[1]
            key = kind, *((t.shape, t.numpy().tobytes()) for t in others)
            if key not in ran:
                ran.add(key)
                last[:] = [original(*args, **named)]
            return last[0]

        return forward

    def keep(hidden: Tensor) -> Tensor:
        head_inputs.append(hidden)
        return hidden[..., :1]  # so that no logits of a large vocabulary are computed or made

    _, *layers, head = blocks
    replaced = {name: once(model.get_submodule(name).forward, blocks[name]) for name in layers}
    for name, forward in {**replaced, head: keep}.items():
        vars(model.get_submodule(name))["forward"] = forward
    try:
        model(input_ids=ids, position_ids=positions, use_cache=False)
    finally:
        for name in (*layers, head):
            del vars(model.get_submodule(name))["forward"]
    return head_inputs[0]
