"""LLaMA-Factory's named chat templates (of its version 0.9.6): the text that each writes around messages. Does not
import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PREFIX = "llama_factory:"
"""A job's `chat_template` that begins with this names one of LLaMA-Factory's templates: "llama_factory:NAME"."""
PARSED = f"{PREFIX}parsed"
"""Stands for the template that LLaMA-Factory derives from the tokenizer's own chat template, where its file names
none."""
BOS, EOS = "{{bos}}", "{{eos}}"
_CONTENT = "{{content}}"
_BORDER = re.compile(r"(\{\{(?:bos|eos|cut|token:[^}]+)\}\})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTemplate:
    """One of LLaMA-Factory's templates: a text for each kind of message, with placeholders.

    `{{content}}` stands for the message, and `{{bos}}`, `{{eos}}` and `{{token:…}}` for single tokens. At each of these
    tokens and at `{{cut}}` the text is split, and the parts are tokenized separately.

    `calls` and `results`: the texts for messages that call tools, and for those with the tools' results; None: as
    `assistant` and `user`. `tools`: the format in which tool definitions and calls are written (`llama_factory_tools`).
    `stops`: tokens that end an answer. `system_in_user`: the system text is part of the user's first message.
    `reasons`: an answer without thoughts gets empty ones, which are the two texts of `thought`. `closes_thought`: of
    these only the second is written. `call_marks`: the marks around tool calls in the data. `ends_once`: only the last
    answer has an end token behind it. `replaces_eos`: the first of `stops` becomes the tokenizer's end token.
    `replaces_jinja`: the tokenizer's own chat template is replaced.
    """

    user: str
    assistant: str = "{{content}}{{eos}}"
    system: str = "{{content}}"
    calls: str | None = None
    results: str | None = None
    prefix: str = ""
    tools: str = "default"
    default_system: str = ""
    stops: tuple[str, ...] = ()
    system_in_user: bool = False
    reasons: bool = False
    closes_thought: bool = False
    thought: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    call_marks: tuple[str, str] = ("<tool_call>", "</tool_call>")
    ends_once: bool = False
    replaces_eos: bool = False
    replaces_jinja: bool = False

    @property
    def empty_thought(self) -> str:
        """The text that an answer without thoughts gets in their place."""
        return self.thought[1] if self.closes_thought else "".join(self.thought)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The texts of this template that must be single tokens of the tokenizer: those that LLaMA-Factory looks up as
        tokens, and the end marks of answers that it adds as tokens."""
        texts = (self.prefix, self.system, self.user, self.results or "", self.assistant, self.calls or "")
        named = [border[8:-2] for text in texts for border in _BORDER.findall(text) if border.startswith("{{token:")]
        return tuple(dict.fromkeys((*named, *(stop for stop in self.stops if any(stop in text for text in texts)))))

    def jinja(self, bos: str, eos: str) -> str | None:
        """Return the Jinja chat template that LLaMA-Factory stores in the tokenizer; None where it stores none. `bos`,
        `eos`: the tokenizer's tokens. It writes no tools, and the text that begins an answer is at the end of the
        user's message."""
        texts = (self.prefix, self.system, self.user, self.assistant)
        if any("{{token:" in text for text in texts):
            return None

        def written(text: str, content: str) -> str:
            parts = [bos if part == BOS else eos if part == EOS else part for part in _BORDER.split(text)]
            before, has, behind = "".join(part for part in parts if part != "{{cut}}").partition(_CONTENT)
            shown = [
                *([_quoted(before)] if before else ()),
                *([content] if has else ()),
                *([_quoted(behind)] if behind else ()),
            ]
            return " ~ ".join(shown) or "''"

        default = f"{{% set system_message = {_quoted(self.default_system)} %}}" if self.default_system else ""
        system, set_content = written(self.system, "system_message"), "{% set content = message['content'] %}"
        shown = "{% if system_message is defined %}{{ " + system + " }}{% endif %}"
        if self.system_in_user:
            first = "{% if loop.index0 == 0 and system_message is defined %}{% set content = " + system
            set_content, shown = f"{first} ~ message['content'] %}}{{% else %}}{set_content}{{% endif %}}", ""
        return (
            "{{ "
            + written(self.prefix, "''")
            + " }}"
            + default
            + "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
            "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% endif %}"
            + shown
            + "{% for message in loop_messages %}"
            + set_content
            + "{% if message['role'] == 'user' %}{{ "
            + written(self.user, "content")
            + " }}{% elif message['role'] == 'assistant' %}{{ "
            + written(self.assistant, "content")
            + " }}{% endif %}{% endfor %}"
        )


def parts(text: str, content: str, **more: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a template's text that are tokenized separately, with the message `content` filled in. Each
    comes with whether it is a placeholder for a token: `{{bos}}`, `{{eos}}` or `{{token:…}}`. `more`: texts for other
    placeholders."""
    for part in _BORDER.split(text):
        if _BORDER.fullmatch(part):
            if part != "{{cut}}":
                yield part, True
            continue
        for name, value in {"content": content, **more}.items():
            part = part.replace(f"{{{{{name}}}}}", value, 1)  # also within filled-in text, as LLaMA-Factory does
        if part:
            yield part, False


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@cache
def _table() -> dict[str, dict[str, Any]]:
    templates: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return templates


def has_slots(name: object) -> bool:
    """Return whether offmate knows LLaMA-Factory's template of this name."""
    return isinstance(name, str) and name in _table()


@cache
def slot_template(chat_template: str | None) -> SlotTemplate | None:
    """Return the LLaMA-Factory template that a job's `chat_template` names; None where it is no name of such a
    template. For `PARSED`, return the template for a tokenizer without a chat template. Raises ValueError for an
    unknown name."""
    if chat_template is None or not chat_template.startswith(PREFIX):
        return None
    if chat_template == PARSED:
        return slot_template(f"{PREFIX}empty")
    name = chat_template.removeprefix(PREFIX)
    if not has_slots(name):
        known = ", ".join(sorted(_table()))
        raise ValueError(f"offmate knows no template {name} of LLaMA-Factory for texts; known are {known}")
    fields: dict[str, Any] = dict(_table()[name])
    while (like := fields.pop("like", None)) is not None:
        fields = _table()[like] | fields
    lists: dict[str, Any] = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    return SlotTemplate(**(fields | lists))
