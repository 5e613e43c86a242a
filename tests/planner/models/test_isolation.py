"""Documents that are packed into one row do not see each other; a model in which they would is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.errors import UserError
from planner.graph import find_blocks
from planner.job.schema import Job
from planner.measure.analysis import analyse
from planner.models.hf_model import sample_batch, skeleton_model
from planner.models.isolation import check_isolation
from tests.support.families import FAMILIES, assert_bitwise, family_model, trained
from tests.support.tiny_models import VOCABULARY, batch_of, config_of

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "use_cache": False,
}
_HEADS = {**_COMMON, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_ALTERNATING = ["linear_attention", "full_attention"] * 2
_LLAMA_4 = {**_HEADS, **_EXPERTS, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 64}
OTHERS: dict[str, tuple[type[T.PretrainedConfig], dict[str, Any]]] = {
    "minimax": (T.MiniMaxConfig, {**_HEADS, **_EXPERTS, "layer_types": _ALTERNATING, "block_size": 8}),
    "minimax_full": (T.MiniMaxConfig, {**_HEADS, **_EXPERTS, "layer_types": ["full_attention"] * 4}),
    "qwen3_next": (
        T.Qwen3NextConfig,
        {
            **_HEADS,
            "head_dim": 8,
            "layer_types": _ALTERNATING,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "jamba": (
        T.JambaConfig,
        {**_HEADS, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    ),
    "mamba": (T.MambaConfig, {**_COMMON, "state_size": 8}),
    "mamba2": (T.Mamba2Config, {**_COMMON, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}),
    "falcon_mamba": (T.FalconMambaConfig, {**_COMMON, "state_size": 8}),
    "falcon_h1": (T.FalconH1Config, {**_HEADS, **_MAMBA_2, "mamba_d_ssm": 64}),
    "bamba": (T.BambaConfig, {**_HEADS, **_MAMBA_2, "attn_layer_indices": [1, 3]}),
    "granitemoehybrid": (
        T.GraniteMoeHybridConfig,
        {**_HEADS, **_EXPERTS, **_MAMBA_2, "layer_types": _ALTERNATING, "shared_intermediate_size": 16},
    ),
    "recurrent_gemma": (T.RecurrentGemmaConfig, {**_HEADS, "head_dim": 8, "lru_width": 32}),
    "rwkv": (T.RwkvConfig, {**_COMMON, "attention_hidden_size": 32, "intermediate_size": 48}),
    "lfm2": (T.Lfm2Config, {**_HEADS, "layer_types": ["conv", "full_attention"] * 2}),
    "lfm2_full": (T.Lfm2Config, {**_HEADS, "layer_types": ["full_attention"] * 4}),
    "gpt_oss": (T.GptOssConfig, {**_HEADS, **_EXPERTS, "head_dim": 8, "sliding_window": 8}),
    "falcon": (T.FalconConfig, {**_COMMON, "num_attention_heads": 4}),
    "mpt": (T.MptConfig, {**_COMMON, "d_model": 32, "n_heads": 4, "n_layers": 4}),
    "xglm": (T.XGLMConfig, {**_COMMON, "d_model": 32, "ffn_dim": 48, "attention_heads": 4, "num_layers": 4}),
    "smollm3": (T.SmolLM3Config, _HEADS),
    "cohere2": (T.Cohere2Config, {**_HEADS, "sliding_window": 8}),
    "olmoe": (T.OlmoeConfig, {**_HEADS, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        T.DeepseekV3Config,
        {
            **_HEADS,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "llama4": (T.Llama4TextConfig, _LLAMA_4),
    "llama4_scaled": (T.Llama4TextConfig, {**_LLAMA_4, "floor_scale": 8}),  # by places in the row
}
CPU = torch.device("cpu")
LEAKING = {
    "bloom",
    "opt",
    "minimax",
    "qwen3_next",
    "jamba",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "falcon_h1",
    "bamba",
    "granitemoehybrid",
    "recurrent_gemma",
    "rwkv",
    "lfm2",
    "gpt_oss",
    "falcon",
    "mpt",
    "xglm",
    "llama4_scaled",
}
MODELS = {**FAMILIES, **OTHERS}


def packed(seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of two documents, 6 and 10 tokens."""
    batch = batch_of(seed)
    positions = torch.cat((torch.arange(6), torch.arange(10))).repeat(2, 1)
    batch["labels"][:, [0, 6]] = -100
    return {**batch, "position_ids": positions}


def job_of(config: T.PretrainedConfig, folder: Path, **keys: Any) -> Job:
    """A job that packs documents for a model of this config."""
    config.save_pretrained(folder)
    keys = {"packing": True, "max_length": 16, **keys}
    return Job(model=str(folder), tokenizer=str(folder), dataset=("none",), **keys)


def refusal(job: Job) -> UserError | None:
    """What is said of packing for the job's model."""
    model = skeleton_model(job)
    try:
        check_isolation(job, find_blocks(model, sample_batch(job, model)))
    except UserError as error:
        assert error.code == "packing-not-isolated"
        return error
    return None


@torch.no_grad()
def leak(config: T.PretrainedConfig) -> float:
    """How far packed documents are from those documents alone, in the model itself."""
    torch.manual_seed(0)
    model = T.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        p += 0.1 * torch.randn_like(p)
    batch = packed()
    ids = batch["input_ids"]
    together = model(input_ids=ids, position_ids=batch["position_ids"]).logits
    apart = torch.cat((model(input_ids=ids[:, :6]).logits, model(input_ids=ids[:, 6:]).logits), 1)
    return float((together - apart).abs().max() / apart.abs().max())


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that an operation filled; what is `empty` takes none."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        for tensor in filter(torch.is_tensor, tree_leaves(made)):
            storage = tensor.untyped_storage()
            if not tensor.is_meta and func is not torch.ops.aten.empty.memory_format and storage._cdata not in given:
                self.bytes = max(self.bytes, storage.nbytes())
        return made


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_refused_where_documents_of_a_row_see_each_other_and_nowhere_else(name: str, tmp_path: Path) -> None:
    cls, keys = MODELS[name]
    refused, leaks = refusal(job_of(cls(**keys), tmp_path)), leak(cls(**keys))
    assert leaks > 1e-3 if name in LEAKING else leaks < 1e-5
    assert (refused is not None) == (name in LEAKING)
    if refused is not None:
        assert "two documents in a row give other numbers than each alone" in refused.numbers[0]


def test_linear_attention_that_leaks_is_refused_when_the_job_is_planned(tmp_path: Path) -> None:
    cls, keys = OTHERS["minimax"]
    job = job_of(cls(**keys), tmp_path)
    with pytest.raises(UserError) as refused:
        analyse(job, CPU)
    assert refused.value.code == "packing-not-isolated"
    assert refused.value.numbers[0].startswith("MiniMaxForCausalLM: two documents in a row give other numbers")
    analyse(job.model_copy(update={"packing": "wrapped"}), CPU)


def test_what_only_longer_rows_would_show_is_asked_by_how_long_the_jobs_rows_are(tmp_path: Path) -> None:
    config = T.Llama4TextConfig(**{**_LLAMA_4, "floor_scale": 64})
    assert refusal(job_of(config, tmp_path, max_length=64)) is None
    assert refusal(job_of(config, tmp_path, max_length=128)) is not None


def test_adapters_change_nothing_of_it(tmp_path: Path) -> None:
    for name, leaks in (("llama", False), ("bloom", True)):
        cls, keys = FAMILIES[name]
        folder = tmp_path / name
        job = job_of(cls(**keys), folder, method="lora", lora_r=2, lora_alpha=2.0, lora_dropout=0.0)
        assert (refusal(job) is not None) == leaks


def test_a_model_that_cannot_be_tried_is_refused_by_why(tmp_path: Path) -> None:
    config = config_of("llama")
    job = job_of(config, tmp_path)
    model = skeleton_model(job)
    names = find_blocks(model, sample_batch(job, model))
    with pytest.raises(UserError) as refused:
        check_isolation(job, replace(names, layers=(*names.layers[:-1], "model.layers.9")))
    assert "it cannot be tried: AttributeError" in refused.value.numbers[0]


def test_a_model_of_billions_of_parameters_is_tried_in_little_memory(tmp_path: Path) -> None:
    job = job_of(T.LlamaConfig(vocab_size=128_256, intermediate_size=14_336), tmp_path)
    model = skeleton_model(job)
    names = find_blocks(model, sample_batch(job, model))
    with Largest() as largest:
        check_isolation(job, names)
    assert sum(p.numel() for p in model.parameters()) > 8e9
    assert 0 < largest.bytes < 2**24


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_packed_rows_are_trained_bitwise(name: str) -> None:
    assert_bitwise(trained(lambda: family_model(name), packed, slices=2, steps=2, clip=0.5))
