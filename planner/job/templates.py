"""Chat templates by the names that axolotl and LLaMA-Factory have for them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_FILES = {
    "llama3": "llama3", "qwen": "qwen2_5", "qwen_25": "qwen2_5", "qwen3": "qwen3", "gemma": "gemma", "gemma3": "gemma3",
    "phi": "phi3", "phi_3": "phi3", "phi_35": "phi3_5", "cohere": "cohere", "aya": "cohere",
    "qwen3_nothink": "qwen3_instruct_2507",
    "deepseek_v3": "deepseekv3", "gemma3n": "gemma3", "gemma4": "gemma4", "gemma4_unified": "gemma4",
}  # fmt: skip
_CHATMLS = ("chatml", "qwen3_5_nothink")
NAMES = (*_CHATMLS, *_FILES)
"""What a template may be called. `qwen3_5_nothink` is ChatML: what that Qwen writes where it does not think."""
_FAMILIES = """
    command_a deepseek_v2 exaone exaone4 falcon_h1 jamba llama4 mistral_v1 mistral_v2v3 mistral_v3_tekken
    mistral_v7_tekken nemotron_h phi_4 qwen3_5
    bailing bailing_v2 chatglm3 deepseek deepseek3 deepseekcoder deepseekr1 ernie ernie_nothink falcon gemma2 glm4
    glm4_7 glm4_moe glmz1 gpt_oss granite3 granite4 hunyuan hunyuan_small index intern2 kimi lfm2 llama2 mimo mimo_v2
    minimax1 minimax2 ministral ministral3 mistral mistral_small moonlight olmo opencoder phi4 phi4_mini phi_small
    qwen3_6 qwen3_vl qwen3_vl_nothink sailor seed_coder seed_oss smollm smollm2 solar telechat2 yi youtu yuan
"""
FAMILIES = frozenset(_FAMILIES.split())
"""The names that axolotl and LLaMA-Factory have for what models of a family write, beside those above: the tokenizer's
own template, as it came with the model."""


GIVE_TEMPLATE = "give chat_template in the job file: the path of a Jinja template, or a name such as chatml"
"""What helps where a tokenizer has none."""


def named_template(name: str) -> str | None:
    """The template of that name, as TRL ships it; None for others. Reads a file and imports nothing."""
    if name in _CHATMLS:
        return _CHATML
    if name not in _FILES:
        return None
    found = find_spec("trl")
    assert found is not None and found.origin is not None  # it is installed with offmate
    return (Path(found.origin).parent / "chat_templates" / f"{_FILES[name]}.jinja").read_text("utf-8")
