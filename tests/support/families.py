"""Tiny models of every family of language models, with dropout wherever the family has it, and batches with masks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers as T
from torch import nn

from planner.measure.analysis import Analysis, analyse_model
from tests.support.engine_plans import adamw, chain_of, mixed_plan, timed
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import VOCABULARY, batch_of
from worker.engine.engine import Engine

_COMMON = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, **_COMMON}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_DROP = {"attention_dropout": 0.1}
_BY_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
# Windows are shorter than the test's rows.
FAMILIES: dict[str, tuple[type[T.PretrainedConfig], dict[str, Any]]] = {
    "llama": (T.LlamaConfig, {**_GROUPED, **_DROP}),
    "mistral": (T.MistralConfig, {**_GROUPED, **_DROP, "sliding_window": 8}),
    "phi": (T.PhiConfig, {**_SIZES, **_DROP, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "phi3": (T.Phi3Config, {**_GROUPED, **_DROP, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "sliding_window": 8}),
    "bloom": (T.BloomConfig, {"hidden_size": 32, "n_layer": 3, "n_head": 4, "hidden_dropout": 0.1, **_DROP, **_COMMON}),
    "gpt2": (
        T.GPT2Config,
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, **_COMMON},
    ),
    "qwen2": (
        T.Qwen2Config,
        {
            **_GROUPED,
            **_DROP,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
    ),
    "qwen3": (T.Qwen3Config, {**_GROUPED, **_DROP, "head_dim": 8}),
    "gemma2": (T.Gemma2Config, {**_GROUPED, **_DROP, "head_dim": 8, "sliding_window": 8}),
    "gemma3": (
        T.Gemma3TextConfig,
        {
            **_GROUPED,
            **_DROP,
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    # Each layer has a part of another embedding; the third takes the keys and values of the second.
    "gemma3n": (
        T.Gemma3nTextConfig,
        {
            **_GROUPED,
            **_DROP,
            **_BY_LAYER,
            "intermediate_size": [64] * 3,
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.9, 0.0, 0.0],
        },
    ),
    "gemma4": (
        T.Gemma4TextConfig,
        {
            **_GROUPED,
            **_DROP,
            **_BY_LAYER,
            "head_dim": 8,
            "global_head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
        },
    ),
    "mixtral": (
        T.MixtralConfig,
        {
            **_GROUPED,
            **_DROP,
            "num_local_experts": 4,
            "experts_implementation": "batched_mm",
            "output_router_logits": True,  # the loss has the routers' share
        },
    ),
    "opt": (
        T.OPTConfig,
        {
            "hidden_size": 32,
            "word_embed_proj_dim": 16,
            "ffn_dim": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "dropout": 0.1,
            **_DROP,
            **_COMMON,
        },
    ),
    "gpt_neox": (T.GPTNeoXConfig, {**_SIZES, **_DROP, "hidden_dropout": 0.1}),
}


def family_model(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    """A seeded model of the family in training mode, with `settings` of its config changed."""
    cls, config = FAMILIES[name]
    torch.manual_seed(0)
    model: nn.Module = T.AutoModelForCausalLM.from_config(cls(**{**config, **settings}), dtype=dtype)
    return model.train()


def t5(dtype: torch.dtype = torch.float32) -> nn.Module:
    """An encoder and a decoder of two layers each, whose embeddings and head are one tensor."""
    config = T.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    torch.manual_seed(0)
    model: nn.Module = T.AutoModelForSeq2SeqLM.from_config(config, dtype=dtype)
    return model.train()


@functools.cache
def analysis_of(name: str) -> Analysis:
    """Of the family's model, or of `t5`, for slices like `batch_of()`: a trace takes long, and several tests ask."""
    return analyse_model(t5() if name == "t5" else family_model(name), batch_of(), device=torch.device("cpu"))


def masked_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """input_ids, labels and attention_mask [2, 16]: the first row ends with padding, the second begins with it."""
    batch = batch_of(seed)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -5:] = mask[1, :3] = 0
    batch["labels"][mask == 0] = -100
    return {**batch, "attention_mask": mask}


def trained(
    make_model, batches, *, slices, steps, clip=None, plan_of=mixed_plan, sums=True, device="cpu", analysis=None
):
    """Train two equal models, one under a plan. Returns the losses and the parameters of both, named, on the host.
    `sums`: the model divides its loss by the number of tokens of the whole step. `analysis`: of such a model for such
    slices, where there is one."""
    model, plain, device = make_model(), make_model(), torch.device(device)
    settings = {"optimizer": adamw(model), "max_grad_norm": clip}
    chain = timed(analysis) if analysis is not None else chain_of(model, batches(0), device)
    plan = plan_of(chain, slices=slices, clip=clip is not None)
    engines = (
        Engine(model, plan=plan, chain=chain, device=device, **settings),
        PlainEngine(plain.to(device), device=device, **settings),
    )
    losses = [{}, {}]
    for step in range(steps):
        given = [batches(10 * step + k) for k in range(slices)]
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in given) if sums else 0
        seeds = [100 * step + k for k in range(slices)]
        for engine, found in zip(engines, losses, strict=True):
            result = engine.step(
                given, seeds=seeds, learning_rate=1e-3, **({"num_items_in_batch": count} if sums else {})
            )
            found.update({f"loss {step}.{k}": loss.cpu() for k, loss in enumerate(result.losses)})
    engines[0].restore()
    plain.cpu()
    return [{**found, **dict(m.named_parameters())} for found, m in zip(losses, (model, plain), strict=True)]


def assert_bitwise(both):
    got, expected = both
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []
