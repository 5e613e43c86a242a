"""A model whose rotary positions go by the length of a row computes each row, and each document, by its own."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch import Tensor, nn

from planner.errors import UserError
from planner.job.rope_border import RopeBorder
from planner.models.rope import border_of
from tests.support.texts import byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.data.batches import Batches

_SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [32.0] * 4,
    "original_max_position_embeddings": 40,
}
PHI = T.Phi3Config(
    **_SIZES, max_position_embeddings=256, original_max_position_embeddings=40, rope_parameters=_LONGROPE
)
DYNAMIC = T.LlamaConfig(
    **_SIZES, max_position_embeddings=40, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
)


def batches(tmp_path: Path, lengths: list[int], config: T.PretrainedConfig = PHI, **keys: Any) -> Batches:
    """Of documents of so many tokens, the end token included."""
    records = [{"text": chr(97 + number) * (length - 1)} for number, length in enumerate(lengths)]
    job = make_job(
        tiny_llama_folder(tmp_path / "model"), write_jsonl(tmp_path / "data.jsonl", records), max_length=200, **keys
    )
    return Batches(job, byte_tokenizer(), border=border_of(config))


def model_of(config: T.PretrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = T.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return model


@torch.no_grad()
def off(config: T.PretrainedConfig, data: Batches, steps: int) -> float:
    """How far any document's logits are from those of that document alone, without padding."""
    model, most = model_of(config), 0.0
    for batch in (batch for step in range(steps) for batch in data.step(step)):
        labels = batch.pop("labels")
        together = model(**batch).logits
        positions = batch.get("position_ids", torch.arange(labels.shape[1]).expand_as(labels))
        for ids, logits, places, learned in zip(batch["input_ids"], together, positions, labels, strict=True):
            begins = [*(places == 0).nonzero().flatten().tolist(), len(ids)]
            for first, past in pairwise(begins):
                if bool((learned[first:past] != -100).any()):
                    last = first + int((learned[first:past] != -100).nonzero()[-1]) + 1
                    alone: Tensor = model(input_ids=ids[None, first:last]).logits[0]
                    most = max(most, float((logits[first:last] - alone).abs().max()))
    return most


@pytest.mark.parametrize("config", [PHI, DYNAMIC])
def test_rows_below_the_border_are_not_padded_beyond_it(config: T.PretrainedConfig, tmp_path: Path) -> None:
    data = batches(tmp_path, [39, 40, 12, 31], config, per_device_train_batch_size=2)
    assert {batch["input_ids"].shape[1] for step in range(2) for batch in data.step(step)} <= {25, 38, 40}
    assert off(config, data, 2) < 1e-5


def test_rows_on_both_sides_are_right_one_by_one(tmp_path: Path) -> None:
    data = batches(tmp_path, [39, 41, 12, 180], per_device_train_batch_size=1, gradient_accumulation_steps=2)
    assert off(PHI, data, 2) < 1e-5


def test_packed_documents_below_the_border_are_right_in_rows_beyond_it(tmp_path: Path) -> None:
    data = batches(tmp_path, [40] * 6 + [30], packing=True, per_device_train_batch_size=2)
    (batch,) = data.step(0)
    assert batch["input_ids"].shape == (2, 200) and batch["position_ids"].max() == 39
    assert off(PHI, data, 1) < 1e-5


@pytest.mark.parametrize(
    ("keys", "what"), [({"per_device_train_batch_size": 2}, "rows"), ({"packing": True}, "documents")]
)
def test_rows_or_documents_on_both_sides_together_are_refused(keys: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        batches(tmp_path, [39, 41, 12, 180], **{"per_device_train_batch_size": 1, **keys})
    assert (refused.value.code, refused.value.what) == (
        "rope-by-length",
        f"The model computes {what} differently when others in the micro-batch are longer.",
    )
    assert f"2 of 4 {what} are longer than 40 tokens" in refused.value.numbers[0]
    assert "per_device_train_batch_size: 1 with packing: false" in str(refused.value)


def test_with_a_dynamic_rope_no_row_is_beyond_the_border(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="max_length: 40"):
        batches(tmp_path, [39, 41], DYNAMIC, per_device_train_batch_size=1)


def test_the_border_is_the_configs_and_others_have_none() -> None:
    assert border_of(PHI) == RopeBorder(40, by_length=False)
    assert border_of(DYNAMIC) == RopeBorder(40, by_length=True)
    assert border_of(T.LlamaConfig(**_SIZES)) is None
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    assert border_of(T.LlamaConfig(**_SIZES, rope_parameters=yarn)) is None
    assert border_of(T.Gemma3TextConfig(**_SIZES)) is None
