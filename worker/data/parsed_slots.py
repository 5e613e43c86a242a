"""Derives LLaMA-Factory's template from the tokenizer's own chat template, for a file that names no template."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from planner.errors import Exit, UserError, first_line
from planner.job.slot_templates import SlotTemplate
from planner.job.source import shown
from worker.data.bounds import bounded

_CONTENT = "{{content}}"


def parsed_slots(tokenizer: PreTrainedTokenizerBase) -> SlotTemplate:
    """The template that LLaMA-Factory (0.9.6, `parse_template`) derives from the tokenizer's chat template. Raises
    UserError "no-chat-template" where it cannot derive one."""
    try:
        with bounded():
            return _parsed(tokenizer)
    except UserError:
        raise
    except Exception as error:  # a template may raise anything
        raise UserError(
            "LLaMA-Factory can make no template of the tokenizer's chat template.", code="no-chat-template",
            exit_code=Exit.USAGE, numbers=(f"{type(error).__name__}: {first_line(error)}",),
            hint="name one: template: qwen3, or another of LLaMA-Factory's",
        ) from error  # fmt: skip


def _parsed(tokenizer: PreTrainedTokenizerBase) -> SlotTemplate:
    prefix = str(tokenizer.decode(tokenizer.encode("")))

    def text(*turns: tuple[str, str], asks: bool) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        shown: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=asks, tokenize=False)
        return str(shown)[len(prefix) :]

    system = text(("system", _CONTENT), asks=False)
    asked = text(("system", ""), ("user", _CONTENT), asks=True)
    user = text(("user", _CONTENT), asks=True)
    assistant = text(("user", _CONTENT), ("assistant", _CONTENT), asks=False)[len(user) :]
    reasons = "<think>" in assistant
    assistant = assistant.replace("<think>", "").replace("</think>", "").lstrip("\n")
    default = ""
    if len(user) > len(asked):  # the template adds a default system text
        default = _more(asked, user)
        user = user[len(system.replace(_CONTENT, default, 1)) :]
    if missing := [text for text in (system, user, assistant) if _CONTENT not in text]:
        raise ValueError(f"it does not show what is said: {shown(missing[0])}")
    return SlotTemplate(
        prefix=prefix, system=system, user=user, assistant=assistant, default_system=default, reasons=reasons
    )


def _more(short: str, long: str) -> str:
    """The characters of `long` that remain when those of `short` are matched in order; ends with the last match."""
    at, more = 0, ""
    for char in long:
        if at == len(short):
            break
        if short[at] == char:
            at += 1
        else:
            more += char
    return more
