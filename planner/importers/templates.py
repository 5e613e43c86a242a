"""Chat templates that have a name in axolotl or LLaMA-Factory."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from planner.importers.axolotl_templates import TEMPLATES

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TURNS = (
    "{{% for message in messages %}}{{% if message['role'] == 'system' %}}{{{{ {system} }}}}"
    "{{% elif message['role'] == 'user' %}}{{{{ {user} }}}}"
    "{{% elif message['role'] == 'assistant' %}}{{% generation %}}{{{{ {learned} }}}}{{% endgeneration %}}"
    "{behind}{{% endif %}}{{% endfor %}}"
)
_UNASKED = "{{% if messages[0]['role'] != 'system' %}}{{{{ {text} }}}}{{% endif %}}"


def _of_turns(system: str, user: str, learned: str, *, behind: str = "", unasked: str = "") -> str:
    """Return a Jinja chat template made of Jinja expressions, one for each kind of message, in which `said` stands for
    the message's content. `unasked`: what comes first in a conversation without a system message. The text that begins
    an answer belongs to the end of `user`. `behind`: template text behind an answer."""
    parts = {"system": system, "user": user, "learned": learned}
    texts = {name: part.replace("said", "message['content']") for name, part in parts.items()}
    return (_UNASKED.format(text=unasked) if unasked else "") + _TURNS.format(**texts, behind=behind)


_ALPACA = "'### Instruction:\n' + said + '\n\n### Response:\n'"
_OWN = {
    # LLaMA-Factory's `alpaca`, which begins with Alpaca's own words where a conversation has no system message
    "alpaca_with_system": _of_turns(
        "said",
        _ALPACA,
        "said + eos_token + '\n\n'",
        unasked="'Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n'",
    ),
    "default": _of_turns(
        "'System: ' + said + eos_token + '\n'",
        "'Human: ' + said + eos_token + '\nAssistant:'",
        "said + eos_token + '\n'",
    ),
    "vicuna": _of_turns(
        "said",
        "'USER: ' + said + ' ASSISTANT:'",
        "said + eos_token",
        unasked="'A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user\\'s questions.'",
    ),
    "zephyr": _of_turns(
        "'<|system|>\n' + said + eos_token",
        "'<|user|>\n' + said + eos_token + '<|assistant|>\n'",
        "said + eos_token",
        unasked="'<|system|>\nYou are Zephyr, a helpful assistant.' + eos_token",
    ),
}
"""Templates for base models, whose tokenizers have none, as LLaMA-Factory writes them."""
_FILES = {
    "llama3": "llama3",
    "qwen": "qwen2_5",
    "qwen_25": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3",
    "gemma": "gemma",
    "gemma3": "gemma3",
    "phi": "phi3",
    "cohere": "cohere",
    "aya": "cohere",
    "qwen3_nothink": "qwen3_instruct_2507",
    "deepseek_v3": "deepseekv3",
    "gemma3n": "gemma3",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma4",
}
_CHATMLS = ("chatml", "qwen3_5_nothink")
NAMES = (*_CHATMLS, *_FILES, *_OWN, *TEMPLATES)
"""The names of all templates. Those that axolotl has, too, write the same as axolotl's. `qwen3_5_nothink` is ChatML,
which Qwen3.5 writes when it does not think."""

GIVE_TEMPLATE = "give chat_template in the job file: the path of a Jinja template, or a name such as chatml"
"""The hint of the error where a tokenizer has no chat template."""


def named_template(name: str) -> str | None:
    """Return the text of the Jinja chat template that axolotl or LLaMA-Factory call `name`; None for an unknown name.
    Some are files of TRL, which is not imported."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    if name in _CHATMLS:
        return _CHATML
    if name in _OWN:
        return _OWN[name]
    if name not in _FILES:
        return None
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None  # it is installed with offmate
    return (Path(spec.origin).parent / "chat_templates" / f"{_FILES[name]}.jinja").read_text("utf-8")
