"""Chains of Llamas of real sizes, traced without weights, for tests of what lies where in the device's memory."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import transformers as T
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from planner.machine.hardware import Hardware
from planner.machine.presets import preset
from planner.measure.analysis import analyse_model, estimate_times
from planner.schedule.chain import Chain

SHAPES = {  # width, inner width, layers, heads, of keys and values, vocabulary
    "0.3B": (1024, 2816, 16, 16, 8, 32000),
    "1B": (2048, 8192, 16, 32, 8, 128256),
    "3B": (3072, 8192, 28, 24, 8, 128256),
    "8B": (4096, 14336, 32, 32, 8, 128256),
}


def machine() -> Hardware:
    """An RTX 3060 beside any amount of host memory."""
    return replace(preset("RTX 3060", bf16=True), cpu_bytes=2**42)


@functools.cache
def llama_chain(name: str, *, rows: int = 1, length: int = 1024, layers: int | None = None) -> Chain:
    """The chain of a shape in bf16, its times estimated, with what its turns allocate."""
    width, inner, all_layers, heads, kv_heads, vocabulary = SHAPES[name]
    config = T.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers or all_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = T.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its buffers have values
    ids = torch.zeros(rows, length, dtype=torch.int64)
    analysis = analyse_model(model, {"input_ids": ids, "labels": ids}, device=torch.device("cpu"), arranged=True)
    return analysis.chain(estimate_times(analysis, machine()))
