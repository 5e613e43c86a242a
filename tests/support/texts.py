"""Small data, tokenizers and job files for tests of the trainer, all made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from planner.job.schema import Job

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(*, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, then <eos> (256), <pad> (257), <|im_start|> (258), <|im_end|> (259)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = chat_template
    return fast


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    """`records`, one JSON object per line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def tiny_llama_folder(folder: Path, *, chat_template: str | None = None, vocabulary: int = 260) -> Path:
    """A model folder with config and tokenizer and no weights: Llama, 3 layers, width 32."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attention_dropout=0.1,
        eos_token_id=256,
        pad_token_id=257,
        bos_token_id=None,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    byte_tokenizer(chat_template=chat_template).save_pretrained(folder)
    return folder


def make_job(model: Path, dataset: Path | list[Path], **keys: Any) -> Job:
    """A job from the keys that differ from the defaults; in fp32 unless they say otherwise, whatever card is here."""
    files = dataset if isinstance(dataset, list) else [dataset]
    values = {"model": str(model), "dataset": [str(file) for file in files], "bf16": False, **keys}
    return Job.parse(yaml.safe_dump(values), Path("/"))


def sentences(count: int) -> list[dict[str, str]]:
    """Records with a `text` each, of differing lengths."""
    return [{"text": f"{i} " + "the quick brown fox jumps over the lazy dog. "[: 8 + 5 * i % 37]} for i in range(count)]
