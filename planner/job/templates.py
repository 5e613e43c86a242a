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
    "phi": "phi3", "phi_3": "phi3", "phi_35": "phi3_5",
}  # fmt: skip
NAMES = ("chatml", "qwen3_nothink", *_FILES)
"""What a template may be called. `qwen3_nothink` is ChatML: what Qwen 3 writes where it does not think."""


GIVE_TEMPLATE = "give chat_template in the job file: the path of a Jinja template, or a name such as chatml"
"""What helps where a tokenizer has none."""


def named_template(name: str) -> str | None:
    """The template of that name, as TRL ships it; None for others. Reads a file and imports nothing."""
    if name in ("chatml", "qwen3_nothink"):
        return _CHATML
    if name not in _FILES:
        return None
    found = find_spec("trl")
    assert found is not None and found.origin is not None  # it is installed with offmate
    return (Path(found.origin).parent / "chat_templates" / f"{_FILES[name]}.jinja").read_text("utf-8")
