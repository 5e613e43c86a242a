"""The end tokens that LLaMA-Factory's templates give a tokenizer (its `replace_eos`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_IM_END = """
    chatml lfm2 mimo mimo_v2 moonlight phi4 qwen qwen3 qwen3_nothink qwen3_5 qwen3_5_nothink qwen3_6 qwen3_vl
    qwen3_vl_nothink
"""
REPLACED: dict[str, str] = {
    **dict.fromkeys(_IM_END.split(), "<|im_end|>"), **dict.fromkeys(("gemma", "gemma3", "gemma3n"), "<end_of_turn>"),
    **dict.fromkeys(("phi", "phi_small", "phi4_mini"), "<|end|>"),
    "gemma4": "<turn|>", "llama3": "<|eot_id|>", "llama4": "<|eot|>", "youtu": "<|end_of_text|>",
}  # fmt: skip
"""Name of a template -> the end token that a tokenizer has under it, whatever it had before: the first of its
`stop_words`. Templates that are not here leave the tokenizer its own."""


def replace_end(values: dict[str, Any], file: Mapping[str, object]) -> str:
    """Put the end token of the `template` in a LLaMA-Factory `file` into `values`, whose keys are canonical. Returns
    what to say of it; "" where nothing is replaced."""
    template, special = str(file.get("template")), values.get("special_tokens") or {}
    texts = file.get("stage") == "pt" and template == "llama3"  # there its texts end with another one
    if template not in REPLACED or texts or not isinstance(special, dict) or "eos_token" in special:
        return ""
    end = REPLACED[template]
    values["special_tokens"] = {"eos_token": end, **special}
    if file.get("resize_vocab") is True and values.get("add_tokens") in (None, ""):
        values["add_tokens"] = [end, *(["<|im_start|>"] if template == "chatml" else [])]
    return f"template: {template} makes {end} the tokenizer's end token, as there"
