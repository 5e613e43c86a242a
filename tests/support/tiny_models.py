"""Tiny causal language models from configs, with dropout, for tests."""

from __future__ import annotations

import torch
import transformers as T
from torch import nn

VOCABULARY = 128
NAMES = ("llama", "gpt2", "qwen2", "bloom")


def config_of(
    name: str, *, width: int = 32, layers: int = 3, dropout: float = 0.1, vocabulary: int = VOCABULARY
) -> T.PretrainedConfig:
    """The config of a tiny model. gpt2, qwen2 and bloom tie the head to the embedding."""
    common = {"vocab_size": vocabulary, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
    match name:
        case "gpt2":
            return T.GPT2Config(
                n_embd=width,
                n_layer=layers,
                n_head=4,
                n_positions=128,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                **common,
            )
        case "bloom":
            return T.BloomConfig(
                hidden_size=width, n_layer=layers, n_head=4, hidden_dropout=dropout, attention_dropout=dropout, **common
            )
        case "mixtral":  # with its experts as parameters, which a trace can follow
            return T.MixtralConfig(
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_local_experts=4,
                attention_dropout=dropout,
                experts_implementation="batched_mm",
                **common,
            )
        case "gpt_oss":
            return T.GptOssConfig(
                hidden_size=width,
                intermediate_size=width,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=width // 4,
                num_local_experts=4,
                num_experts_per_tok=2,
                **common,
            )
        case "llama" | "qwen2":
            cls = {"llama": T.LlamaConfig, "qwen2": T.Qwen2Config}[name]
            return cls(
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                attention_dropout=dropout,
                tie_word_embeddings=name == "qwen2",
                **common,
            )
    raise ValueError(name)


def make_model(name: str, dtype: torch.dtype = torch.float32, **shape: object) -> nn.Module:
    """A seeded model in training mode."""
    torch.manual_seed(0)
    return T.AutoModelForCausalLM.from_config(config_of(name, **shape), dtype=dtype).train()


def batch_of(
    seed: int = 0, rows: int = 2, length: int = 16, vocabulary: int = VOCABULARY, padded: bool = False
) -> dict[str, torch.Tensor]:
    """input_ids and labels [rows, length]; `padded`: the last tokens of each row have label -100."""
    ids = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    if padded:
        labels[:, length - 3 :] = -100
    return {"input_ids": ids, "labels": labels}
