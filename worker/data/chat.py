"""Conversations as text, with what the assistant says marked, through the tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from planner.errors import Exit, UserError
from planner.job.records import Message

Spans = tuple[tuple[int, int], ...]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """Renders conversations. Raises UserError when the tokenizer has no template and none is given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                "The data are conversations, and the tokenizer has no chat template.", code="no-chat-template",
                exit_code=Exit.USAGE, hint="give chat_template, the path of a Jinja template, in the job file",
            )  # fmt: skip
        self._template: str = tokenizer.get_chat_template()
        self._special: dict[str, str] = {k: str(v) for k, v in tokenizer.special_tokens_map.items()}
        self._end: str | None = tokenizer.eos_token

    def render(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        """The conversation's text, and the spans of characters that the assistant writes, its end mark included.

        Templates with `{% generation %}` say it themselves. For others a turn is what its message adds to the
        conversation before it. Raises UserError when the template refuses the conversation, or shows a turn in a form
        that cannot be found again.
        """
        try:
            if _GENERATION.search(self._template):
                return self._render(messages, return_assistant_tokens_mask=True)
            text = self._text(messages)
            return text, tuple(self._turns(text, messages))
        except TemplateError as error:
            raise UserError(
                "The chat template refuses a conversation.", code="chat-template-refuses", exit_code=Exit.USAGE,
                numbers=(f"{type(error).__name__}: {error}", f"roles: {', '.join(m['role'] for m in messages)}"),
                hint="correct the record, or give another chat_template",
            ) from error  # fmt: skip

    def _render(self, messages: Sequence[Message], **flags: bool) -> tuple[str, Spans]:
        options: dict[str, Any] = {**self._special, **flags}
        # Declared to return a string; it returns a list of texts and a list of spans, one each per conversation.
        rendered: Any = render_jinja_template([list(messages)], chat_template=self._template, **options)
        (text,), spans = rendered
        return text, tuple((start, end) for start, end in spans[0]) if spans else ()

    def _text(self, messages: Sequence[Message], *, answer: bool = False) -> str:
        return self._render(messages, add_generation_prompt=answer)[0]

    def _turns(self, text: str, messages: Sequence[Message]) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:index], answer=True) if index else ""
            after = self._text(messages[: index + 1])
            start, end = len(before), len(after)
            if not (index and text.startswith(after) and after.startswith(before)):
                since = spans[-1][1] if spans else 0
                start, end = self._search(text, messages[: index + 1], before, after, since)
            spans.append((start, self._without_space_after_end(text, start, end)))
        return spans

    def _search(self, text: str, messages: Sequence[Message], before: str, after: str, since: int) -> tuple[int, int]:
        """Where the last of `messages` is in `text`, for templates that show a turn differently once it is past."""
        content = messages[-1]["content"].strip()
        prompt = before[len(self._text(messages[:-1])) :] if len(messages) > 1 else ""
        found = text.find(prompt + content, since) if content else -1
        if found < 0:
            raise UserError(
                "The chat template does not show what the assistant says as it is in the data.",
                code="assistant-turn-not-found", exit_code=Exit.USAGE,
                numbers=(f"turn: {messages[-1]['content'][:200]!r}",),
                hint="use train_on: all, or a chat_template with {% generation %} around the assistant's turns",
            )  # fmt: skip
        start = found + len(prompt)
        end = start + len(content)
        mark = after[after.rfind(content) + len(content) :]
        return start, end + len(mark) if text.startswith(mark, end) else end

    def _without_space_after_end(self, text: str, start: int, end: int) -> int:
        """Templates write a newline after the end mark; the model never gets to say it, so it is not trained."""
        turn = text[start:end].rstrip()
        return start + len(turn) if self._end and turn.endswith(self._end) else end
