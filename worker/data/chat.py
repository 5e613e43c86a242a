"""Renders conversations as text with the tokenizer's chat template, and finds in it what the assistant says."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from planner.data.entry import LearnedTurns
from planner.data.json_values import json_in
from planner.data.records import Message
from planner.errors import Exit, UserError, first_line
from planner.importers.templates import GIVE_TEMPLATE
from planner.keys.source import shown
from planner.units import counted
from worker.data.bounds import bounded, check_length
from worker.data.chat_turns import Spans, Turns, ends_of, split_end, stops_of, unasked, unlearned_end
from worker.data.places import REFUSALS, Conversation
from worker.data.shapes import THOUGHTS, Shapes, written

log = logging.getLogger(__name__)

Rendered = TypeVar("Rendered")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_FIRST_MARK = 0xF0000  # in a private use area of Unicode; `shapes` has marks there, too, but in other renderings
_SHOWN = ("tool_calls", "refusal", *THOUGHTS)
"""Keys under which a message may say something beside its content. A template that does not show them would train an
answer without what it says there."""


class ChatTemplate:
    """Renders conversations as text with a chat template. Raises UserError when the tokenizer has no template and none
    is given.

    The template decides which text counts as the assistant's. It does so by `{% generation %}`, in the template itself
    or, where TRL knows the template, in the form of it that TRL trains with. Without `{% generation %}`, an assistant's
    turn is the text that the message adds to the conversation before it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        everything: bool = False,
        learned: LearnedTurns | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        """`everything`: all of the text is learned, whoever says it. `learned`: these turns are learned, found in the
        tokenizer's own template by axolotl's rules. `values`: what the template is told beside the messages."""
        if not tokenizer.chat_template:
            raise UserError(
                "The data are conversations, and the tokenizer has no chat template.",
                code="no-chat-template",
                exit_code=Exit.USAGE,
                hint=GIVE_TEMPLATE,
            )
        try:
            self._template: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(
                "The tokenizer has several chat templates, and none of them is named default.",
                code="no-chat-template",
                exit_code=Exit.USAGE,
                numbers=(first_line(error),),
                hint=GIVE_TEMPLATE,
            ) from error
        self._origin = _origin(tokenizer)
        self._check_syntax()
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
        self._left_out: list[str] = []  # one list shared by all copies that `told` makes
        self._shapes = Shapes(self._template)
        self._ended_by = self._ends()
        ends = self._ends(tokenizer.eos_token)
        self._turns = Turns(learned or LearnedTurns(roles=frozenset()), self._template, tokenizer, ends)
        if self._chosen:
            self._turns.check_marks()

    def _check_syntax(self) -> None:
        """Raise UserError "bad-chat-template" for a template that fails to compile, whatever the data are."""
        try:
            with bounded():
                render_jinja_template([[]], chat_template=self._template)
        except (TemplateSyntaxError, SyntaxError) as error:
            if isinstance(error, TemplateSyntaxError):
                cause = f"line {error.lineno} of the template: {error.message}"
            else:
                cause = f"compiled to Python: {error.msg}"  # no line: those of the compiled code are others
            raise UserError(
                "The chat template has a mistake, whatever the data are.",
                code="bad-chat-template",
                exit_code=Exit.USAGE,
                numbers=(cause, self._origin),
                hint="correct the template, or give another one: chat_template, the path of a file or a name such as "
                "chatml",
            ) from error
        except REFUSALS:  # it compiles, but wants messages, which it gets later
            pass

    def warn_of_split_end(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Log a warning where the template ends answers with a mark that this tokenizer splits into several tokens."""
        with contextlib.suppress(*REFUSALS):
            note = split_end(lambda messages, **flags: self._render(messages, None, **flags)[0], tokenizer)
            if note is not None:
                log.warning("data: %s", note)

    def warn_of_answers(self) -> None:
        """Log a warning where the generation prompt differs from how answers begin in training, and one where the end
        of answers is not learned."""

        def told(note: str | None) -> None:
            if note is not None:
                log.warning("data: %s", note)

        with contextlib.suppress(*REFUSALS):
            told(unasked(lambda messages, **flags: self._render(messages, None, **flags)[0]))
        with contextlib.suppress(*REFUSALS):
            if self._marked and not self._everything and not self._chosen:
                told(unlearned_end(lambda messages: self._render(messages, None), self._ended_by))

    @property
    def stops(self) -> tuple[str, ...]:
        """The special tokens at which generation may stop: the template ends an answer with them and never writes them
        within an answer."""
        with contextlib.suppress(*REFUSALS):  # the template refuses such a conversation
            return stops_of(lambda messages, **flags: self._render(messages, None, **flags)[0], self._marks)
        return ()

    def told(self, values: Mapping[str, Any]) -> ChatTemplate:
        """A copy of this template that passes `values` as variables to each rendering. They take precedence over its
        own variables."""
        if not values:
            return self
        template = copy.copy(self)
        template._values = {**self._values, **values}
        return template

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None) -> tuple[str, Spans]:
        """Render a conversation. Returns its text, and the spans of characters that are learned: what the assistant
        writes, with its end mark. Assistant messages with `train: False` are left out of the spans; messages of others
        with `train: True` are added.

        Raises UserError when the template refuses the conversation, does not show something that a message says, or
        shows a message so that its place in the text cannot be determined."""
        return _in_one_day(lambda: self._rendered(messages, tools))

    def _rendered(self, messages: Sequence[Message], tools: list[Any] | None) -> tuple[str, Spans]:
        with _refusals_told(messages, self._origin):
            plain, text, spans = self._shown(_plain(messages), tools)
            conversation = self._conversation(text, plain, tools)
            self._tell_left_out(text, plain)
            if self._everything:
                return text, ((0, len(text)),)
            if self._chosen:
                return text, self._turns.spans(text, messages, conversation.said)
            if self._marked:
                conversation.check_marked(spans)
                spans = self._learned(spans, messages, conversation)
            else:
                wanted = [index for index in _answers(plain) if messages[index].get("train", True)]
                spans = tuple(span for index in wanted for span in conversation.turn(index))
            others = [m if m["role"] != "assistant" else m | {"train": False} for m in messages]
            if any(message.get("train") for message in others):
                spans = tuple(sorted((*spans, *self._turns.spans(text, others, conversation.said))))
        return text, spans

    def pair(
        self, prompt: Sequence[Message], completion: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[str, Spans]:
        """Render prompt and completion together. Returns the text, and the span of characters that is learned: all that
        follows the prompt with its generation prompt, as with TRL's `completion_only_loss`. Raises UserError as
        `render` does."""
        return _in_one_day(lambda: self._pair(_plain([*prompt, *completion]), len(prompt), tools))

    def _pair(self, messages: list[Message], prompt_count: int, tools: list[Any] | None) -> tuple[str, Spans]:
        with _refusals_told(messages, self._origin):
            messages, text, _ = self._shown(messages, tools)
            self._tell_left_out(text, messages)
            start = self._conversation(text, messages, tools).going_on(prompt_count)
        return text, ((start, len(text)),)

    def asked(self, prompt: Sequence[Message], answer: Message, tools: list[Any] | None = None) -> tuple[str, str]:
        """Render a question and its answer. Returns (the text of the prompt with the generation prompt, the text of
        prompt and answer together). The template may leave out the thoughts of earlier answers, as these answers are
        not learned here. Raises UserError as `render` does."""
        bare = [{key: value for key, value in message.items() if key not in THOUGHTS} for message in prompt]
        with _refusals_told([*prompt, answer], self._origin):
            whole, without = (self._render([*messages, answer], tools)[0] for messages in (prompt, bare))
            before = self._render(prompt, tools, add_generation_prompt=True)[0]
        text, _ = self.pair(bare if whole == without else prompt, [answer], tools)
        return before, text

    def answered(
        self, prompt: Sequence[Message], answer: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[str, str]:
        """Render a prompt and its answer. Returns (the text of the prompt with the generation prompt, the text of both
        together). Raises UserError as `render` does, but where the answer stands need not be clear."""
        return _in_one_day(lambda: self._answered(_plain([*prompt, *answer]), len(prompt), tools))

    def _answered(self, messages: list[Message], prompt_count: int, tools: list[Any] | None) -> tuple[str, str]:
        with _refusals_told(messages, self._origin):
            messages, text, _ = self._shown(messages, tools)
            self._conversation(text, messages, tools)
            self._tell_left_out(text, messages)
            return self._render(messages[:prompt_count], tools, add_generation_prompt=True)[0], text

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text of the conversation, ending with the generation prompt, after which the assistant is to go on.
        Raises UserError when the template refuses the conversation."""
        with _refusals_told(messages, self._origin):
            return self._render(messages, None, add_generation_prompt=True)[0]

    def _shown(self, messages: list[Message], tools: list[Any] | None) -> tuple[list[Message], str, Spans]:
        """(the messages, their text, the spans that the template marks in it). Arguments of calls may be a JSON text,
        as OpenAI has them. Where the template would encode this as JSON once more, the messages get the object."""
        text, spans = self._render(messages, tools)
        if twice := {
            arguments for arguments in _arguments_as_json(messages) if json.dumps(arguments, ensure_ascii=False) in text
        }:
            messages = [_with_objects(message, twice) for message in messages]
            text, spans = self._render(messages, tools)
        return messages, text, spans

    def _render(self, messages: Sequence[Message], tools: list[Any] | None, **flags: bool) -> tuple[str, Spans]:
        options: dict[str, Any] = {**self._special, **self._values, **flags}
        options["return_assistant_tokens_mask"] = self._marked
        # Its annotation says str, but it returns a list of texts and a list of spans, one of each per conversation.
        with bounded():
            rendered: Any = render_jinja_template(
                [list(messages)], tools=tools, chat_template=self._template, **options
            )
        (text,), spans = rendered
        check_length(text, len(str(messages)) + len(str(tools)))
        return text, tuple((start, end) for start, end in spans[0]) if spans else ()

    def _ends(self, end: str | None = None) -> tuple[str, ...]:
        with contextlib.suppress(*REFUSALS):  # the template refuses such a conversation
            return ends_of(lambda messages, **flags: self._render(messages, None, **flags)[0], self._marks, end)
        return ()

    def _conversation(self, text: str, messages: Sequence[Message], tools: list[Any] | None) -> Conversation:
        """The conversation whose text this is. Raises UserError "template-drops" where the text is the same without
        something that a message says: the template does not fit the data."""
        conversation = Conversation(
            self._render,
            self._shapes,
            messages,
            tools,
            text,
            values=repr(self._values),
            marks=self._marks,
            ends=self._ended_by,
        )
        if (index := conversation.unshown()) is not None:
            role, content = messages[index]["role"], messages[index]["content"]
            raise UserError(
                f"The chat template does not show what the {role} says in turn {index + 1} of a conversation.",
                code="template-drops",
                exit_code=Exit.USAGE,
                numbers=(f"turn: {shown(content, 200)}", conversation.roles),
                hint="give a chat_template that shows it, or take it out of the data",
            )
        hidden = [
            key for key in _SHOWN if any(message.get(key) for message in messages) and not conversation.shows(key)
        ]
        without = {
            key: ([{k: v for k, v in message.items() if k != key} for message in messages], tools) for key in hidden
        }
        if tools:
            without["tools"] = (list(messages), None)
        for key, (others, offered) in without.items():
            try:
                same = self._render(others, offered)[0] == text
            except REFUSALS:  # the template needs the key
                same = False
            if same:
                raise UserError(
                    f"The chat template does not show the {key} of a conversation.",
                    code="template-drops",
                    exit_code=Exit.USAGE,
                    numbers=(conversation.roles,),
                    hint=f"give a chat_template that shows {key}, or take {key} out of the data",
                )
        self._refuse_dropped_calls(text, messages, tools)
        return conversation

    def _refuse_dropped_calls(self, text: str, messages: Sequence[Message], tools: list[Any] | None) -> None:
        """Raise UserError where the text is the same without one of a message's calls, or without its arguments.

        One rendering with marks in place of all names and arguments proves that most calls are shown. Each call whose
        marks are missing there is then tested alone, by leaving it out.
        """
        marks: dict[tuple[int, int], str] = {}
        marked = [*messages]
        for index, message in enumerate(messages):
            if _called(message):
                marked[index] = copy.deepcopy(message)
                for place, function in enumerate(_called(marked[index])):
                    marks[index, place] = mark = chr(_FIRST_MARK + len(marks))
                    function |= {"name": mark, "arguments": {mark * 2: mark * 3}}
        shown = ""
        with contextlib.suppress(*REFUSALS):
            shown = self._render(marked, tools)[0] if marks else ""
        for (index, place), mark in marks.items():
            if not all(re.search(f"(?<!{mark}){mark * count}(?!{mark})", shown) for count in (1, 3)):
                self._refuse_dropped_call(text, messages, tools, index, place)

    def _refuse_dropped_call(
        self, text: str, messages: Sequence[Message], tools: list[Any] | None, index: int, place: int
    ) -> None:
        without, bare = copy.deepcopy(messages[index]), copy.deepcopy(messages[index])
        call = _called(messages[index])[place]
        del without["tool_calls"][place]
        _called(bare)[place]["arguments"] = {}
        for other in (without, bare) if call.get("arguments") else (without,):
            with contextlib.suppress(*REFUSALS):  # the template needs the call or its arguments
                if self._render([*messages[:index], other, *messages[index + 1 :]], tools)[0] == text:
                    raise UserError(
                        f"The chat template does not show all calls of turn {index + 1} of a conversation.",
                        code="template-drops",
                        exit_code=Exit.USAGE,
                        numbers=(f"call: {shown(call, 200)}",),
                        hint="give a chat_template that shows each call with its arguments",
                    )

    def _tell_left_out(self, text: str, messages: Sequence[Message]) -> None:
        """Warn once where the template leaves out a part of what an answer says or thinks."""
        for index in _answers(messages):
            for part in (messages[index].get(key) for key in ("content", *THOUGHTS)):
                if isinstance(part, str) and not self._left_out and not any(as_is in text for as_is in written(part)):
                    self._left_out.append(part)
                    log.warning(
                        "data: the chat template leaves out a part of what answers say, which is not learned: of %s",
                        shown(part, 200),
                    )

    def _learned(self, spans: Spans, messages: Sequence[Message], conversation: Conversation) -> Spans:
        """Those of the template's marked `spans` whose turns are learned. Raises UserError "turns-not-marked" where the
        spans cannot be assigned to turns."""
        answers = _answers(messages)
        wanted = [messages[index].get("train", True) for index in answers]
        if all(wanted):
            return spans
        if not any(wanted):
            return ()
        if len(spans) != len(wanted) or not all(map(conversation.is_within, answers, spans)):
            raise UserError(
                "The chat template does not mark each of the assistant's turns, and some are not to be learned.",
                code="turns-not-marked",
                exit_code=Exit.USAGE,
                numbers=(f"{counted(len(wanted), 'turn')}, {counted(len(spans), 'mark')}",),
                hint="give a chat_template with {% generation %} around each of the assistant's turns",
            )
        return tuple(span for span, learned in zip(spans, wanted, strict=True) if learned)


def _in_one_day(render: Callable[[], Rendered]) -> Rendered:
    """Call `render`, and again if it fails while midnight passes: templates show dates, and texts are compared."""
    day = date.today()
    try:
        return render()
    except UserError:
        if date.today() == day:
            raise
        return render()


@contextlib.contextmanager
def _refusals_told(messages: Sequence[Message], origin: str) -> Iterator[None]:
    try:
        yield
    except REFUSALS as error:
        raise UserError(
            "The chat template refuses a conversation.",
            code="chat-template-refuses",
            exit_code=Exit.USAGE,
            numbers=(f"{type(error).__name__}: {error}", f"roles: {', '.join(m['role'] for m in messages)}", origin),
            hint="correct the record, or give another chat_template",
        ) from error


def _origin(tokenizer: PreTrainedTokenizerBase) -> str:
    """Where a tokenizer's chat template came from, in words."""
    own_template = tokenizer.init_kwargs.get("chat_template")
    if isinstance(own_template, list):  # transformers turns the list into a mapping
        own_template = {each["name"]: each["template"] for each in own_template}
    if tokenizer.chat_template != own_template:
        return "the template: chat_template of the job"
    name = str(tokenizer.name_or_path)
    file = next((path for path in map(Path(name).joinpath, _FILES) if path.is_file()), None)
    return f"the template: that of the tokenizer, {name if file is None else file}"


def _plain(messages: Sequence[Message]) -> list[Message]:
    """The messages as the template gets them: without the key `train`."""
    return [{key: value for key, value in message.items() if key != "train"} for message in messages]


def _arguments_as_json(messages: Sequence[Message]) -> Iterator[str]:
    """The arguments of calls that are a JSON text of an object."""
    for arguments in (function.get("arguments") for message in messages for function in _called(message)):
        with contextlib.suppress(ValueError):
            if isinstance(arguments, str) and isinstance(json_in(arguments), dict):
                yield arguments


def _with_objects(message: Message, arguments: set[str]) -> Message:
    """A copy of the message in whose calls these JSON `arguments` are replaced by the objects that they encode."""
    message = copy.deepcopy(message)
    for function in _called(message):
        if isinstance(encoded := function.get("arguments"), str) and encoded in arguments:
            function["arguments"] = json_in(encoded)
    return message


def _called(message: Message) -> list[dict[str, Any]]:
    """The functions that a message calls, given under `function` as OpenAI does, or directly as the call."""
    calls = message.get("tool_calls")
    functions = [
        call.get("function", call) for call in (calls if isinstance(calls, list) else []) if isinstance(call, dict)
    ]
    return [function for function in functions if isinstance(function, dict)]


def _answers(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _training_form(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The form of the tokenizer's template that TRL trains with; None where TRL does not know the template."""
    from trl.chat_template_utils import get_training_chat_template  # late: it takes a second

    try:
        with bounded():
            template: str | None = get_training_chat_template(tokenizer)
    except REFUSALS:  # TRL does not know it; its own trial rendering may raise anything
        return None
    return template
