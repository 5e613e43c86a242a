"""Conversations as text, with what the assistant says marked, through the tokenizer's chat template."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from planner.errors import Exit, UserError, first_line
from planner.job.data_entry import LearnedTurns
from planner.job.records import Message
from planner.job.templates import GIVE_TEMPLATE
from worker.data.bounds import bounded, check_length
from worker.data.turns import SOMETHING, Spans, Turns, common, ends_of, split_end, stops_of

log = logging.getLogger(__name__)

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHOWN = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""What a message may say beside its content. A template that leaves it out would train an answer without it."""

_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What rendering raises for a conversation that is not as the template wants it."""


class ChatTemplate:
    """Renders conversations. Raises UserError when the tokenizer has no template and none is given.

    What the assistant says is what the template says it is: by `{% generation %}` in the template itself, or in the
    form of it that TRL trains with, where TRL knows it; else by what a turn adds to the conversation before it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, everything: bool = False, learned: LearnedTurns | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`everything`: who says what does not matter, all of it is learned. `learned`: these turns are, found in the
        tokenizer's own template by axolotl's rules. `values`: what the template is told beside the messages."""
        if not tokenizer.chat_template:
            raise UserError(
                "The data are conversations, and the tokenizer has no chat template.", code="no-chat-template",
                exit_code=Exit.USAGE, hint=GIVE_TEMPLATE,
            )  # fmt: skip
        try:
            self._template: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(
                "The tokenizer has several chat templates, none of them for conversations.", code="no-chat-template",
                exit_code=Exit.USAGE, numbers=(first_line(error),),
                hint=GIVE_TEMPLATE,
            ) from error  # fmt: skip
        self._everything = everything
        marked = everything or learned is not None or _GENERATION.search(self._template) is not None
        if not marked and (form := _training_form(tokenizer)):
            log.info("data: the chat template is taken in the form that TRL trains with")
            self._template = form
        self._marked = _GENERATION.search(self._template) is not None
        self._special: dict[str, str] = {k: str(v) for k, v in tokenizer.special_tokens_map.items()}
        self._values = {**(values or {})}
        self._marks = sorted({str(token) for token in tokenizer.added_tokens_decoder.values()}, key=len, reverse=True)
        self._chosen = learned is not None
        self._turns = Turns(learned or LearnedTurns(roles=frozenset()), self._template, tokenizer, self._ends())
        if self._chosen:
            self._turns.check_marks()

    def warn_of_split_end(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Say in the log where answers end with a mark that is no token."""
        with contextlib.suppress(*_REFUSALS):
            note = split_end(lambda messages, **flags: self._render(messages, None, **flags)[0], tokenizer)
            if note is not None:
                log.warning("data: %s", note)

    @property
    def stops(self) -> tuple[str, ...]:
        """The special tokens that the template ends an answer with, and nothing within one."""
        with contextlib.suppress(*_REFUSALS):  # a template that is not for such a conversation
            return stops_of(lambda messages, **flags: self._render(messages, None, **flags)[0], self._marks)
        return ()

    def told(self, values: Mapping[str, Any]) -> ChatTemplate:
        """The template that is told these values, too, and before its others of the same names."""
        if not values:
            return self
        found = copy.copy(self)
        found._values = {**self._values, **values}
        return found

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None) -> tuple[str, Spans]:
        """The conversation's text, and the spans of characters that the assistant writes, its end mark included, less
        the turns whose message has `train: False`, and with others' that have `train: True`.

        Raises UserError when the template refuses the conversation, leaves out something that a message says, or shows
        a turn in a form whose place cannot be told.
        """
        with _refusals_told(messages):
            plain, text, spans = self._shown(_plain(messages), tools)
            self._refuse_dropped(text, plain, tools)
            if self._everything:
                return text, ((0, len(text)),)

            def places(index: int) -> Spans:
                return self._places(text, plain, index, tools)

            if self._chosen:
                return text, self._turns.spans(text, messages, places)
            if self._marked:
                spans = self._learned(spans, messages)
            else:
                wanted = [index for index in _answers(plain) if messages[index].get("train", True)]
                spans = tuple(span for index in wanted for span in self._turn(text, plain, index, tools))
            others = [m if m["role"] != "assistant" else m | {"train": False} for m in messages]
            if any(message.get("train") for message in others):
                spans = tuple(sorted((*spans, *self._turns.spans(text, others, places))))
        return text, spans

    def pair(
        self, prompt: Sequence[Message], completion: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[str, Spans]:
        """The text of both together, of which all is learned that the prompt, asked to be gone on from, does not have:
        TRL's `completion_only_loss`. Raises UserError as `render`."""
        messages = _plain([*prompt, *completion])
        with _refusals_told(messages):
            messages, text, _ = self._shown(messages, tools)
            self._refuse_dropped(text, messages, tools)
            asked = self._render(messages[: len(prompt)], tools, add_generation_prompt=True)[0]
        return text, ((common(text, asked), len(text)),)

    def prompt(self, messages: Sequence[Message]) -> str:
        """The conversation's text up to where the assistant is to go on. Raises UserError when the template refuses."""
        with _refusals_told(messages):
            return self._render(messages, None, add_generation_prompt=True)[0]

    def _shown(self, messages: list[Message], tools: list[Any] | None) -> tuple[list[Message], str, Spans]:
        """The messages with their text and what the template marks in it. Arguments of calls may be JSON of an object,
        as OpenAI has them; where the template would write that as JSON once more, they are the object."""
        text, spans = self._render(messages, tools)
        if twice := {said for said in _arguments_as_json(messages) if json.dumps(said, ensure_ascii=False) in text}:
            messages = [_with_objects(message, twice) for message in messages]
            text, spans = self._render(messages, tools)
        return messages, text, spans

    def _render(self, messages: Sequence[Message], tools: list[Any] | None, **flags: bool) -> tuple[str, Spans]:
        options: dict[str, Any] = {**self._special, **self._values, **flags}
        options["return_assistant_tokens_mask"] = self._marked
        # Declared to return a string; it returns a list of texts and a list of spans, one each per conversation.
        with bounded():
            found: Any = render_jinja_template([list(messages)], tools=tools, chat_template=self._template, **options)
        (text,), spans = found
        check_length(text, len(str(messages)) + len(str(tools)))
        return text, tuple((start, end) for start, end in spans[0]) if spans else ()

    def _ends(self) -> tuple[str, ...]:
        with contextlib.suppress(*_REFUSALS):  # a template that is not for such a conversation
            return ends_of(lambda messages, **flags: self._render(messages, None, **flags)[0], self._marks)
        return ()

    def _refuse_dropped(self, text: str, messages: Sequence[Message], tools: list[Any] | None) -> None:
        """A template that shows the same text without something that was said is not the one for this data."""
        said = [key for key in _SHOWN if any(message.get(key) for message in messages)]
        without = {
            key: ([{k: v for k, v in message.items() if k != key} for message in messages], tools) for key in said
        }
        if tools:
            without["tools"] = (list(messages), None)
        for key, (others, offered) in without.items():
            try:
                same = self._render(others, offered)[0] == text
            except _REFUSALS:  # it cannot do without
                same = False
            if same:
                raise UserError(
                    f"The chat template does not show the {key} of a conversation.", code="template-drops",
                    exit_code=Exit.USAGE, numbers=(f"roles: {', '.join(m['role'] for m in messages)}",),
                    hint=f"give a chat_template that shows {key}, or take {key} out of the data",
                )  # fmt: skip

    def _turn(self, text: str, messages: Sequence[Message], index: int, tools: list[Any] | None) -> Spans:
        """Where `messages[index]` stands in `text`: after what the template asks the assistant to go on from, up to
        where the conversation goes on. Where the template shows a turn otherwise once it is past: where the text
        changes with what is said or called in it, and the end mark behind."""
        content, calls = messages[index]["content"].strip(), messages[index].get("tool_calls")
        start = 0
        if index:
            start = common(text, self._render(messages[:index], tools, add_generation_prompt=True)[0])
        upto = self._render(messages[: index + 1], tools)[0]
        end = self._before_mark(text, common(text, upto))
        if calls and not text.startswith(upto):
            pieces = self._places(text, messages, index, tools)
            if pieces and (pieces[0][0] < start or pieces[-1][1] > end):
                return (*pieces[:-1], (pieces[-1][0], self._past_mark(text, pieces[-1][1])))
        elif end <= start or content not in text[start:end]:
            start, end = self._changing(text, messages, index, tools, {**messages[index], "content": SOMETHING})
            end = self._past_mark(text, end)
        if end <= start or content not in text[start:end]:
            raise UserError(
                "The chat template does not show what the assistant says as it is in the data.",
                code="assistant-turn-not-found", exit_code=Exit.USAGE, numbers=(f"turn: {content[:200]!r}",),
                hint="use train_on: all, or a chat_template with {% generation %} around the assistant's turns",
            )  # fmt: skip
        written = text[start:end].rstrip()
        if any(written.endswith(mark) for mark in self._marks):  # the newline after an end mark is the template's
            end = start + len(written)
        return ((start, end),)

    def _places(self, text: str, messages: Sequence[Message], index: int, tools: list[Any] | None) -> Spans:
        """Where what `messages[index]` says, its calls included, stands in `text`; nowhere where it is not shown.
        Raises UserError where others' words are not told apart from it: a template may show the results of calls
        within the turn that called, and what is said beside the calls behind them."""
        message = messages[index]
        bare, other = {"role": message["role"], "content": SOMETHING}, {**message, "content": SOMETHING}
        silent = {**message, "content": ""}
        if found := self._as_last(text, messages, index, tools, message):
            return (found,)
        if message.get("tool_calls") and (calls := self._as_last(text, messages, index, tools, silent)):
            with contextlib.suppress(*_REFUSALS):
                said = self._changing(text, messages, index, tools, other)
                if calls[1] <= said[0]:
                    return calls, said
        with contextlib.suppress(*_REFUSALS):
            start, end = self._changing(text, messages, index, tools, bare)
            if end <= start:
                return ()
            behind = [{**next_one, "content": SOMETHING} for next_one in messages[index + 1 : index + 2]]
            if all(end <= self._changing(text, messages, index + 1, tools, changed)[0] for changed in behind):
                return ((start, end),)
        raise UserError(
            f"The chat template does not show turn {index + 1} of a conversation apart from what others say.",
            code="turns-not-apart", exit_code=Exit.USAGE, numbers=(f"roles: {', '.join(m['role'] for m in messages)}",),
            hint="give a chat_template that shows one turn after another",
        )  # fmt: skip

    def _as_last(
        self, text: str, messages: Sequence[Message], index: int, tools: list[Any] | None, message: Message
    ) -> tuple[int, int] | None:
        """Where `text` has what changes with `message` at the place `index`, where nothing follows it, or else where
        the results of its calls do not, as some templates refuse these without the calls; None where it does not."""
        bare = {"role": message["role"], "content": SOMETHING}
        for behind in ([], [*dropwhile(lambda other: other["role"] == "tool", messages[index + 1 :])]):
            with contextlib.suppress(*_REFUSALS):
                shorter = [*messages[:index], message, *behind]
                shown = self._render(shorter, tools)[0]
                start, end = self._changing(shown, shorter, index, tools, bare)
                if end > start and text.startswith(shown[:end]):
                    return start, end
        return None

    def _changing(
        self, text: str, messages: Sequence[Message], index: int, tools: list[Any] | None, other_message: Message
    ) -> tuple[int, int]:
        """The piece of `text` that is another one with another message in place of `messages[index]`."""
        others = [*messages]
        others[index] = other_message
        other = self._render(others, tools)[0]
        start = common(text, other)
        return start, len(text) - common(text[start:][::-1], other[start:][::-1])

    def _past_mark(self, text: str, end: int) -> int:
        """`end`, or the end of the special token that stands there."""
        return next((end + len(mark) for mark in self._marks if text.startswith(mark, end)), end)

    def _before_mark(self, text: str, end: int) -> int:
        """`end`, or the start of the special token that it lies within: two of them may begin alike."""
        for mark in self._marks:
            start = text.rfind(mark, max(0, end - len(mark) + 1), end + len(mark) - 1)
            if start >= 0 and start < end < start + len(mark):
                return start
        return end

    def _learned(self, spans: Spans, messages: Sequence[Message]) -> Spans:
        """The spans of the turns that are learned."""
        wanted = [messages[index].get("train", True) for index in _answers(messages)]
        if all(wanted):
            return spans
        if len(spans) != len(wanted):
            if not any(wanted):
                return ()
            raise UserError(
                "The chat template does not mark each of the assistant's turns, and some are not to be learned.",
                code="turns-not-marked", exit_code=Exit.USAGE, numbers=(f"{len(wanted)} turns, {len(spans)} marks",),
                hint="give a chat_template with {% generation %} around each of the assistant's turns",
            )  # fmt: skip
        return tuple(span for span, learned in zip(spans, wanted, strict=True) if learned)


@contextlib.contextmanager
def _refusals_told(messages: Sequence[Message]) -> Iterator[None]:
    try:
        yield
    except _REFUSALS as error:
        raise UserError(
            "The chat template refuses a conversation.", code="chat-template-refuses", exit_code=Exit.USAGE,
            numbers=(f"{type(error).__name__}: {error}", f"roles: {', '.join(m['role'] for m in messages)}"),
            hint="correct the record, or give another chat_template",
        ) from error  # fmt: skip


def _plain(messages: Sequence[Message]) -> list[Message]:
    """The messages as the template gets them."""
    return [{key: value for key, value in message.items() if key != "train"} for message in messages]


def _arguments_as_json(messages: Sequence[Message]) -> Iterator[str]:
    """Arguments of calls that are JSON of an object."""
    for said in (function.get("arguments") for message in messages for function in _called(message)):
        with contextlib.suppress(ValueError):
            if isinstance(said, str) and isinstance(json.loads(said), dict):
                yield said


def _with_objects(message: Message, arguments: set[str]) -> Message:
    """The message, in whose calls these arguments are the objects that they are JSON of."""
    message = copy.deepcopy(message)
    for function in _called(message):
        if isinstance(said := function.get("arguments"), str) and said in arguments:
            function["arguments"] = json.loads(said)
    return message


def _called(message: Message) -> list[dict[str, Any]]:
    """The functions that a message calls, as far as they are told as OpenAI does, or at once."""
    calls = message.get("tool_calls")
    told = [call.get("function", call) for call in (calls if isinstance(calls, list) else []) if isinstance(call, dict)]
    return [function for function in told if isinstance(function, dict)]


def _answers(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _training_form(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The template as TRL trains with it; None where TRL does not know it."""
    from trl.chat_template_utils import get_training_chat_template  # late: it takes a second

    try:
        with bounded():
            found: str | None = get_training_chat_template(tokenizer)
    except (ValueError, TemplateError):  # not among those it knows; its own trial renders a conversation
        return None
    return found
