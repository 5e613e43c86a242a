"""The end token that a template of LLaMA-Factory's gives a tokenizer (its `replace_eos`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.job.slot_templates import PREFIX, has_slots, slot_template


def replace_end(values: dict[str, Any], file: Mapping[str, object]) -> str:
    """Put the end token of the `template` in a LLaMA-Factory `file` into `values`, whose keys are canonical. Returns a
    note for the user; "" where nothing is replaced."""
    name, special = file.get("template"), values.get("special_tokens") or {}
    template = slot_template(f"{PREFIX}{name}") if has_slots(name) else None
    texts = file.get("stage") == "pt" and name == "llama3"  # LLaMA-Factory ends these texts with another token
    if template is None or not template.replaces_eos or texts:
        return ""
    if not isinstance(special, dict) or "eos_token" in special:
        return ""
    end = template.stops[0]
    values["special_tokens"] = {"eos_token": end, **special}
    if file.get("resize_vocab") is True and values.get("add_tokens") in (None, ""):
        values["add_tokens"] = [end, *(["<|im_start|>"] if name == "chatml" else [])]
    return f"template: {name} makes {end} the tokenizer's end token, as there"
