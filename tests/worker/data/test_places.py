"""What is learned of a conversation is what the assistant says, wherever and however a template shows who says what."""

from __future__ import annotations

import random
import re
from datetime import date, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from planner.data.entry import LearnedTurns
from planner.errors import UserError
from planner.importers.templates import NAMES, named_template
from tests.support.texts import CHATML, byte_tokenizer
from tests.worker.data.test_chat import CALL, FOLDER, TOOLS, learned
from worker.data import chat as chat_module
from worker.data import shapes
from worker.data.chat import ChatTemplate
from worker.data.documents import _OF_RECORDS

SYSTEM_FIRST = (
    "{%- if messages[0].role == 'system' %}{% set head = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
)
INST = (
    SYSTEM_FIRST + "{%- set last = namespace(user=-1) %}{%- for m in rest if m.role == 'user' %}"
    "{%- set last.user = loop.index0 %}{%- endfor %}{%- set seen = namespace(users=0) %}{{- '<bos>' }}"
    "{%- for m in rest %}{%- if m.role == 'user' %}"
    "{%- if head is defined and WHERE %}{{- '[INST] ' + head + '\n\n' + m.content + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}{%- set seen.users = seen.users + 1 %}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content|trim + '<eos>' }}{%- endif %}{%- endfor %}"
)
ONLY_LAST = INST.replace("WHERE", "loop.last")
"""As of Mistral-7B-Instruct-v0.3: a system message is shown in the user's turn that a conversation ends with."""
LAST_USER = INST.replace("WHERE", "seen.users == last.user")
"""As of Mistral Small: it is shown in the user's last turn."""
COUNTED = "{{ messages|length }} turns\n" + CHATML
QUESTIONS_COUNTED = "{{ messages|selectattr('role', 'equalto', 'user')|list|length }} questions\n" + CHATML
UPSIDE_DOWN = CHATML.replace("in messages", "in messages|reverse")
REMINDING = CHATML.replace(
    "{% if add", "{% if messages[0].role == 'system' %}!{{ messages[0].content }}\n{% endif %}{% if add"
)
"""The system message is shown once more at the end."""
CLOSING = CHATML.replace("{% if add", "{% if not add_generation_prompt %}That was all.{% endif %}{% if add")
TWO_MARKS = CHATML.replace("<|im_end|>", "<|im_end|><eos>")
SHOUTED = CHATML.replace("{{ m['content'] }}", "{{ m.content | upper if m.role == 'user' else m.content }}")
LAST_OPEN = CHATML.replace("<|im_end|>\n{% endfor", "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor")
TOOLS_LAST = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and (loop.last or loop.index0 > 1) %}"
    "[TOOLS]{{ tools[0].function.name }}[/TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[CALLS]{{ m.tool_calls[0].function.arguments | tojson }}<eos>"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content | tojson }}[/RESULT]{% else %}{{ m.content }}<eos>{% endif %}"
    "{% endfor %}"
)
NO_PROMPT = CHATML.partition("{% if add")[0]
UNLEARNED_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OWN = {
    "only last": ONLY_LAST,
    "last user": LAST_USER,
    "counted": COUNTED,
    "questions counted": QUESTIONS_COUNTED,
    "upside down": UPSIDE_DOWN,
    "reminding": REMINDING,
    "last open": LAST_OPEN,
    "shouted": SHOUTED,
    "tools last": TOOLS_LAST,
    "lengths": "{% for m in messages %}{{ m.content|length }} {% endfor %}\n" + CHATML,
    "changed": CHATML.replace("{{ m['content'] }}", "{{ m['content'] | replace(' ', '_') }}"),
    "title": "{{ messages[-1].content }}\n" + CHATML,
    "no prompt": NO_PROMPT,
    "end not marked": UNLEARNED_END,
    "marked": CHATML.replace("{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}"),
    "marks in a macro": "{% macro say(m) %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% endfor %}",
}
FILES = [file.stem for file in sorted(FOLDER.glob("*.jinja"))]
NAMED = [name for name in NAMES if name not in FILES]
SYSTEM, ASKED, HELLO, BYE, FAREWELL = (
    {"role": role, "content": content}
    for role, content in (
        ("system", "Be nice."),
        ("user", "hi"),
        ("assistant", "Hello."),
        ("user", "bye"),
        ("assistant", "Bye now."),
    )
)
TALK = [ASKED, HELLO, BYE, FAREWELL]


def chat_of(template: str, **more: Any) -> ChatTemplate:
    tokenizer = byte_tokenizer(chat_template=template)
    tokens = sorted({*re.findall(r"<[^<>\s{}']{1,30}>", template)} - {"<think>", "</think>"})
    tokenizer.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": tokens})
    return ChatTemplate(tokenizer, **more)


@pytest.mark.parametrize(
    ("template", "talk", "answers"),
    [
        (ONLY_LAST, TALK, [" Hello.<eos>", " Bye now.<eos>"]),
        (LAST_USER, [SYSTEM, *TALK], [" Hello.<eos>", " Bye now.<eos>"]),
        (COUNTED, [SYSTEM, *TALK], ["Hello.<|im_end|>", "Bye now.<|im_end|>"]),
        (QUESTIONS_COUNTED, TALK, ["Hello.<|im_end|>", "Bye now.<|im_end|>"]),
        (UPSIDE_DOWN, TALK, ["Hello.<|im_end|>", "Bye now.<|im_end|>"]),
        (REMINDING, [SYSTEM, *TALK], ["Hello.<|im_end|>", "Bye now.<|im_end|>"]),
        (CLOSING, TALK, ["Hello.<|im_end|>", "Bye now.<|im_end|>"]),
        (CLOSING, [ASKED, HELLO | {"content": "a<|im_end|> b"}], ["a<|im_end|> b<|im_end|>"]),
        (TWO_MARKS, TALK, ["Hello.<|im_end|><eos>", "Bye now.<|im_end|><eos>"]),
        (SHOUTED, TALK, ["Hello.<|im_end|>", "Bye now.<|im_end|>"]),
        (LAST_OPEN, TALK, ["Hello.<|im_end|>", "Bye now."]),
        (COUNTED, [ASKED, {"role": "assistant", "content": ""}, BYE, FAREWELL], ["<|im_end|>", "Bye now.<|im_end|>"]),
        (COUNTED, [ASKED, HELLO, HELLO | {"role": "user"}, HELLO], ["Hello.<|im_end|>"] * 2),
        (ONLY_LAST, [ASKED, {"role": "assistant", "content": "\n [/INST] hi "}], [" [/INST] hi<eos>"]),
    ],
)
def test_answers_and_end_marks_alone_are_learned_where_shorter_conversations_look_otherwise(
    template: str, talk: list[dict[str, Any]], answers: list[str]
) -> None:
    assert sorted(learned(*chat_of(template).render(talk))) == sorted(answers)


def test_a_conversation_that_begins_with_an_answer_has_no_beginning_to_learn() -> None:
    assert learned(*chat_of(CHATML).render([HELLO, BYE, FAREWELL])) == ["Hello.<|im_end|>", "Bye now.<|im_end|>"]


def test_of_a_pair_what_the_completion_says_is_learned_where_the_prompt_alone_looks_otherwise() -> None:
    assert learned(*chat_of(LAST_USER).pair([SYSTEM, ASKED, HELLO, BYE], [FAREWELL])) == [" Bye now.<eos>"]
    assert learned(*chat_of(COUNTED).pair([ASKED], [HELLO, BYE, FAREWELL])) == [
        "Hello.<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\nBye now.<|im_end|>\n"
    ]
    for template in (UPSIDE_DOWN, REMINDING):
        with pytest.raises(UserError) as refused:
            chat_of(template).pair([SYSTEM, ASKED], [HELLO])
        assert refused.value.code == "turns-not-apart"


def test_calls_are_learned_where_the_tools_are_shown_in_another_turn() -> None:
    call: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": CALL}
    talk: list[dict[str, Any]] = [ASKED, HELLO, BYE, call, {"role": "tool", "content": 'a "b"'}, FAREWELL]
    called = '[CALLS]{"a": 2, "b": 3}<eos>'
    chat = chat_of(TOOLS_LAST)
    assert learned(*chat.render(talk, TOOLS)) == ["Hello.<eos>", called, "Bye now.<eos>"]
    assert learned(*chat.pair(talk[:3], talk[3:4], TOOLS)) == [called]


def test_tools_that_are_shown_behind_the_last_turn_are_not_learned() -> None:
    chat = chat_of(CHATML.replace("{% if add", "{% if tools %}{{ tools | tojson }}{% endif %}{% if add"))
    assert learned(*chat.render(TALK, TOOLS)) == ["Hello.<|im_end|>", "Bye now.<|im_end|>"]


@pytest.mark.parametrize("template", ["{{ messages[-1].content }}\n" + CHATML, CHATML + "{{ messages[1].content }}"])
def test_an_answer_that_is_shown_twice_is_refused(template: str) -> None:
    with pytest.raises(UserError) as refused:
        chat_of(template).render(TALK)
    assert refused.value.code == "turns-not-apart" and refused.value.numbers[0].startswith("roles: user, assistant")


def test_words_of_a_template_that_change_with_an_answer_are_not_learned_as_the_answer() -> None:
    chat = chat_of("{{ messages[0].content|length }} characters\n" + CHATML)
    with pytest.raises(UserError) as refused:
        chat.render([HELLO])
    assert refused.value.code == "turns-not-apart"
    thinking = "{{ messages[-1].content|length }}\n" + CHATML.replace("{{ m['c", "{{ m.reasoning_content }}{{ m['c")
    with pytest.raises(UserError, match="apart from what others say"):
        chat_of(thinking).render([HELLO | {"reasoning_content": "Hm."}])
    assert learned(*chat.render([ASKED, HELLO])) == ["Hello.<|im_end|>"], "here it is the user's that are counted"


@pytest.mark.parametrize("template", [CHATML, UPSIDE_DOWN, NO_PROMPT])
def test_of_an_answer_that_ends_with_an_end_mark_the_templates_own_is_learned_too(template: str) -> None:
    (found,) = learned(*chat_of(template).render([ASKED, HELLO | {"content": "Hello.<|im_end|>"}]))
    assert found.endswith("Hello.<|im_end|><|im_end|>")


def test_a_conversation_that_is_rendered_at_midnight_is_rendered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([datetime(2026, 1, 1, 23, 59), *[datetime(2026, 1, 2)] * 1000])
    days = iter([date(2026, 1, 1), *[date(2026, 1, 2)] * 1000])
    template = chat_of("{{ strftime_now('%d') }}\n" + CHATML)
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: next(clock)))
    for module in (chat_module, shapes):
        monkeypatch.setattr(module, "date", SimpleNamespace(today=lambda: next(days)))
    text, spans = template.render([ASKED, HELLO])
    assert text.startswith("02\n")
    assert [text[start:end] for start, end in spans] == ["Hello.<|im_end|>"]


@pytest.mark.parametrize("learned_by", [None, LearnedTurns(roles=frozenset({"assistant"}))])
@pytest.mark.parametrize("everything", [False, True])
def test_a_message_that_is_not_shown_is_refused_by_its_role(everything: bool, learned_by: LearnedTurns | None) -> None:
    chat = chat_of(ONLY_LAST, everything=everything, learned=None if everything else learned_by)
    with pytest.raises(UserError) as refused:
        chat.render([SYSTEM, *TALK])
    assert str(refused.value) == (
        'The chat template does not show what the system says in turn 1 of a conversation.\n  turn: "Be nice."\n'
        "  roles: system, user, assistant, user, assistant\n"
        "  hint: give a chat_template that shows it, or take it out of the data   [template-drops]"
    )
    with pytest.raises(UserError, match="what the system says"):
        chat.pair([SYSTEM, ASKED], [HELLO])
    assert chat.render([SYSTEM | {"content": " "}, *TALK])[0] == chat.render([SYSTEM | {"content": ""}, *TALK])[0]
    assert chat.render([SYSTEM, ASKED])[0] == "<bos>[INST] Be nice.\n\nhi[/INST]"


def test_marks_of_a_template_that_hold_others_words_or_slip_are_refused() -> None:
    with pytest.raises(UserError) as refused:
        chat_of(OWN["marked"]).render(TALK)
    assert refused.value.code == "turns-not-apart" and "holds what the user says in turn 1" in refused.value.what
    with pytest.raises(UserError) as refused:
        chat_of(OWN["marks in a macro"]).render(TALK)
    assert refused.value.code == "turns-not-marked" and "within a macro" in refused.value.hint


def test_a_template_that_marks_a_part_of_answers_is_followed() -> None:
    part = "{{ m.content.split('|')[:-1]|join('|') }}{% generation %}{{ m.content.split('|')[-1] }}{% endgeneration %}"
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'user' %}{{ m.content }}{% else %}"
        + part
        + "{% endif %};{% endfor %}"
    )
    assert learned(*chat_of(template).render([ASKED, HELLO | {"content": "this|is"}])) == ["is"]
    assert learned(*chat_of(template).render(TALK)) == ["Hello.", "Bye now."]


def test_a_template_without_a_generation_prompt_is_told(caplog: pytest.LogCaptureFixture) -> None:
    chat_of(NO_PROMPT).warn_of_answers()
    assert caplog.messages == [
        "data: the chat template has no generation prompt: in training answers stand behind "
        '"<|im_start|>assistant\\n", and where one is asked for, as in samples, by offmate sample or generate, this '
        "is not written: give a chat_template that ends with it where add_generation_prompt is set"
    ]


def test_marks_that_leave_the_end_mark_out_are_told(caplog: pytest.LogCaptureFixture) -> None:
    chat_of(UNLEARNED_END).warn_of_answers()
    assert caplog.messages == [
        "data: the chat template's {% generation %} leaves out <|im_end|>, which ends answers: it is not learned, and "
        "the model does not learn to stop: give a chat_template that has {% endgeneration %} behind it"
    ]
    caplog.clear()
    chat_of(UNLEARNED_END, everything=True).warn_of_answers()
    chat_of(UNLEARNED_END, learned=AXOLOTL).warn_of_answers()
    assert caplog.messages == []


@pytest.mark.parametrize("name", [*FILES, *NAMED, "only last", "last user", "tools last"])
def test_templates_that_ask_as_answers_begin_and_learn_their_end_are_not_told(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    template = OWN.get(name) or named_template(name) or (FOLDER / f"{name}.jinja").read_text("utf-8")
    chat_of(template).warn_of_answers()
    assert caplog.messages == []


LETTERS = {"system": "αβγδε", "user": "бгджз", "tool": "אבגדה", "assistant": "一二三四五"}


def said(rng: random.Random, role: str) -> str:
    words = "".join(rng.choice(LETTERS[role] + ' \n"') for _ in range(rng.randint(1, 6))) + rng.choice(LETTERS[role])
    before, behind = (rng.choice(("", "", " ", "\n\n")) for _ in range(2))
    if role == "assistant" and rng.random() < 0.2:
        before = f"<think>{rng.choice(LETTERS[role])}</think>{before}"
    return before + words + behind


def random_talk(rng: random.Random) -> tuple[list[dict[str, Any]], list[Any] | None]:
    talk: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        talk.append({"role": "system", "content": said(rng, "system")})
    tools = TOOLS if rng.random() < 0.3 else None
    for _ in range(rng.randint(1, 3)):
        talk.append({"role": "user", "content": said(rng, "user")})
        if tools and rng.random() < 0.6:
            talk.append({"role": "assistant", "content": "", "tool_calls": CALL})
            talk.append({"role": "tool", "name": "add", "content": said(rng, "tool")})
        answer = {"role": "assistant", "content": said(rng, "assistant")}
        thought = {"reasoning_content": said(rng, "assistant")} if rng.random() < 0.2 else {}
        talk.append(answer | thought)
    return talk, tools


@pytest.mark.parametrize("name", [*FILES, *(f"{name}, unknown" for name in FILES), *NAMED, *OWN])
def test_no_letter_of_others_is_learned_and_each_of_an_answer_is(name: str) -> None:
    """Whatever is said; templates that TRL knows are also taken as if nobody knew them, without their marks."""
    file, _, unknown = name.partition(", ")
    template = OWN.get(name) or named_template(name) or (FOLDER / f"{file}.jinja").read_text("utf-8")
    if unknown:
        template = "{{ '' }}" + re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "{%- if true %}{% endif -%}", template)
    rng, chats, refused = random.Random(name), (chat_of(template), chat_of(template, learned=AXOLOTL)), 0
    for number in range(60):
        talk, tools = random_talk(rng)
        try:
            text, spans = chats[number % 2].render(talk, tools)
        except UserError as error:
            assert error.code in _OF_RECORDS
            refused += 1
            continue
        found = "".join(learned(text, spans))
        others = {letter for role in ("system", "user", "tool") for letter in LETTERS[role]}
        assert not others & {*found}, (talk, found)
        for letter in LETTERS["assistant"]:
            assert text.count(letter) == found.count(letter), (talk, text, found)
    assert refused < 60 or name.startswith(NEVER)


AXOLOTL = LearnedTurns(roles=frozenset({"assistant"}), eos="none", eot="none")
NEVER = ("idefics3", "smolvlm", "llava_next", "marked", "marks", "lengths", "title", "changed")
"""Templates that show no text, or no answer as it is or by itself."""
