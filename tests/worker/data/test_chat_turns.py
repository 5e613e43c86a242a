"""Which turns are learned by axolotl's rules: what was said, and end marks by its four words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from trl.chat_template_utils import get_training_chat_template

from planner.data.entry import EndMarks, LearnedTurns
from planner.errors import UserError
from planner.importers.axolotl_templates import TEMPLATES
from planner.importers.templates import NAMES, named_template
from tests.support.texts import byte_tokenizer
from tests.worker.data.test_chat import CALL, FOLDER, TALKS, TOOLS, learned, tokenizer_of
from worker.data.chat import ChatTemplate

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be nice"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "no"},
]
END = "<|im_end|>"
LLAMA_3 = named_template("llama3") or ""


def spans(messages: list[dict[str, Any]], *, end: str = END, **choice: Any) -> list[str]:
    """What is learned of a conversation under Qwen's template, with a tokenizer whose end token is `end`."""
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.eos_token = end
    return learned(*ChatTemplate(tokenizer, learned=LearnedTurns(**choice)).render(messages))


ANSWERS = frozenset({"assistant"})
BOTH = frozenset({"assistant", "user"})


@pytest.mark.parametrize(
    ("roles", "eos", "found"),
    [
        (ANSWERS, "turn", ["yes", END, "no", END]),
        (ANSWERS, "last", ["yes", "no", END]),
        (ANSWERS, "none", ["yes", "no"]),
        (ANSWERS, "all", [END, END, "yes", END, END, "no", END]),
        (BOTH, "turn", ["hi", END, "yes", END, "hi", END, "no", END]),
        (frozenset({"system"}), "last", ["be nice", END]),  # as axolotl: that of the last learned turn
        (frozenset(), "turn", []),
        (frozenset(), "all", [END] * 5),
        (None, "none", ["be nice", "hi", "yes", "hi", "no"]),
    ],
)
def test_turns_of_the_roles_are_learned_and_end_marks_by_their_word(
    roles: frozenset[str] | None, eos: EndMarks, found: list[str]
) -> None:
    assert spans(TALK, roles=roles, eos=eos, eot=eos) == found


def test_a_turns_own_word_is_before_its_role() -> None:
    said = [message | word for message, word in zip(TALK, ({}, {"train": True}, {"train": False}, {}, {}), strict=True)]
    assert spans(said, roles=ANSWERS) == ["hi", END, "no", END]
    assert spans(said, roles=frozenset()) == ["hi", END]
    text, found = ChatTemplate(tokenizer_of("qwen2_5")).render(said)  # no word of the entry: the answers are TRL's
    assert learned(text, found) == ["hi", END, f"\nno{END}\n"]


def test_learned_answers_are_trls_where_the_template_writes_nothing_between() -> None:
    tokenizer = tokenizer_of("llama3")
    tokenizer.add_special_tokens({"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"})
    theirs = tokenizer.apply_chat_template(
        TALKS["two turns"],
        chat_template=get_training_chat_template(tokenizer),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    text, found = ChatTemplate(tokenizer, learned=LearnedTurns(roles=ANSWERS)).render(TALKS["two turns"])
    ours = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert ours["input_ids"] == theirs["input_ids"]
    mask = [int(any(s < end and e > start for start, end in found)) for s, e in ours["offset_mapping"]]
    assert mask == theirs["assistant_masks"] and any(mask)


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ({"roles": ANSWERS}, ("hi@", "⟦yes⟧⟦@⟧", "hi@", "⟦no⟧⟦@⟧")),
        ({"roles": BOTH, "eos": "last"}, ("⟦hi⟧@", "⟦yes⟧@", "⟦hi⟧@", "⟦no⟧⟦@⟧")),
        ({"roles": frozenset({"user"}), "eos": "all"}, ("⟦hi⟧⟦@⟧", "yes⟦@⟧", "⟦hi⟧⟦@⟧", "no⟦@⟧")),
        ({"roles": frozenset(), "eos": "none"}, ("hi@", "yes@", "hi@", "no@")),
    ],
)
def test_turns_of_llamas_template_worked_out_by_hand(choice: dict[str, Any], shown: tuple[str, ...]) -> None:
    tokenizer = tokenizer_of("llama3")
    tokenizer.add_special_tokens({"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"})
    wanted = LearnedTurns(**choice, eot=choice.get("eos", "turn"))
    text, found = ChatTemplate(tokenizer, learned=wanted).render(TALK[1:])
    for start, end in reversed(found):
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    written = "<|start_header_id|>user<|end_header_id|>\n\n%s<|start_header_id|>assistant<|end_header_id|>\n\n%s"
    assert text == "<|begin_of_text|>" + (2 * written % shown).replace("@", "<|eot_id|>")


def test_equal_turns_calls_and_what_a_template_writes_in_an_answer_are_told_apart() -> None:
    talk = [*TALKS["calls"][:2], {"role": "tool", "content": "5"}, {"role": "assistant", "content": "5"}]
    tokenizer = tokenizer_of("qwen3")
    tokenizer.eos_token = END
    choice = LearnedTurns(roles=frozenset({"assistant", "tool"}), eos="none", eot="none")
    text, found = ChatTemplate(tokenizer, learned=choice).render(talk, TOOLS)
    call, tool, answer = learned(text, found)
    assert call.startswith("<tool_call>") and CALL[0]["function"]["name"] in call and (tool, answer) == ("5", "5")
    assert text[: found[2][0]].endswith("<think>\n\n</think>\n\n"), "what nobody said is not learned, as in axolotl"


def test_other_marks_than_the_end_of_text_have_their_own_word() -> None:
    marks = (END, "<|nowhere|>")
    assert spans(TALK[:3], end="<eos>", roles=BOTH, marks=marks, eos="none", eot="last") == ["hi", "yes", END]
    assert spans(TALK[:3], end="<eos>", roles=BOTH, marks=marks, eos="all", eot="none") == ["hi", "yes"]


def test_what_the_template_ends_an_answer_with_is_an_end_mark_where_none_are_given() -> None:
    """As under ChatML with the tokenizer of a base model, whose end token is another."""
    assert spans(TALK[:3], end="<eos>", roles=BOTH) == ["hi", END, "yes", END]
    assert spans(TALK[1:], end="<eos>", roles=ANSWERS, eos="last", eot="last") == ["yes", "no", END]
    assert spans(TALK[1:], end="<eos>", roles=ANSWERS, eos="none", eot="none") == ["yes", "no"]


def test_an_end_mark_that_nobody_named_is_told(caplog: pytest.LogCaptureFixture) -> None:
    spans(TALK, end="<eos>", roles=ANSWERS)
    said = "the chat template ends answers with <|im_end|>, which is learned as an end mark; axolotl learns it where"
    assert caplog.messages == [f'data: {said} the file has eot_tokens: ["<|im_end|>"]']
    caplog.clear()
    spans(TALK, end="<eos>", roles=ANSWERS, marks=(END,))
    spans(TALK, end="<eos>", roles=ANSWERS, eos="none", eot="none")
    spans(TALK, roles=ANSWERS)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen3", ("<|im_end|>",)),
        ("gemma3", ("<end_of_turn>",)),
        ("llama3_2", ("<|eot_id|>",)),
        ("phi3_5", ("<|end|>",)),
        ("gptoss", ("<|return|>", "<|end|>")),
        ("glm4moe", ()),
        ("idefics3", ()),
    ],
)
def test_templates_end_answers_with_marks_or_with_the_next_turns_beginning(name: str, ends: tuple[str, ...]) -> None:
    tokenizer = tokenizer_of(name)
    tokens = sorted(set(re.findall(r"<[^<>\s{}']{1,30}>", tokenizer.chat_template)))
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    assert ChatTemplate(tokenizer, everything=True)._ends() == ends


def warned_of(template: str, caplog: pytest.LogCaptureFixture, *tokens: str) -> str:
    caplog.clear()
    tokenizer = byte_tokenizer(chat_template=template)
    tokenizer.add_special_tokens({"bos_token": "<eos>", "additional_special_tokens": [*tokens]})
    ChatTemplate(tokenizer).warn_of_split_end(tokenizer)
    return "\n".join(caplog.messages)


def test_a_template_whose_end_mark_is_no_token_is_told_with_its_other_marks(caplog: pytest.LogCaptureFixture) -> None:
    said = warned_of(LLAMA_3, caplog)
    assert said == (
        "data: the chat template ends answers with <|eot_id|>, which is no token of this tokenizer but split into 10, "
        "as are <|start_header_id|>, <|end_header_id|>; its own end token, <eos>, is not written: give the "
        "chat_template that belongs to this tokenizer (null: the one that it has), or add_tokens: "
        '["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"] and special_tokens: {eos_token: "<|eot_id|>"}'
    )
    assert warned_of(LLAMA_3, caplog, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>") == ""
    assert "<|eot_id|>, which" in warned_of("{{ '' }}" + LLAMA_3, caplog), "also one that nobody has a name for"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TEMPLATES])
def test_of_an_answer_under_a_named_template_axolotl_learns_what_it_says_and_its_end_mark(name: str) -> None:
    template = named_template(name)
    assert template is not None
    tokenizer = byte_tokenizer(chat_template=template)
    tokens = sorted(set(re.findall(r"<[^<>\s{}']{1,30}>", template)))
    tokenizer.add_special_tokens({"bos_token": "<eos>", "additional_special_tokens": tokens})
    chat = ChatTemplate(tokenizer, learned=LearnedTurns(roles=ANSWERS))
    answer, end, *others = learned(*chat.render(TALKS["two turns"]))
    last = ["<eos>"] if name == "phi" else []  # which it writes behind the whole
    assert (answer, others) == ("yes", ["yes", end, *last]) and end in (*tokens, "<eos>")


VICUNA = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}{{ END }}{% endfor %}"


@pytest.mark.parametrize("end", [r"'\n'", "eos_token", "'###'", "' [/INST] '", "''"])
def test_templates_that_end_answers_in_plain_text_or_with_the_end_token_are_not_told(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert warned_of(VICUNA.replace("END", end), caplog) == ""
    assert warned_of(VICUNA.replace("END", end).replace("{{ m.role", "<|{{ m.role }}|>{{ ''"), caplog) == ""


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.jinja")), ids=lambda file: file.stem)
def test_no_models_own_template_is_told(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = file.read_text("utf-8")
    assert warned_of(template, caplog, *set(re.findall(r"<[^<>\s{}']{1,30}>", template))) == ""


@pytest.mark.parametrize("between", ["[INST]", "<|im_start|>{{ m.role }}\n"])
def test_what_begins_a_turn_is_not_taken_for_its_end(between: str) -> None:
    ask = f"{{% for m in messages %}}{between}{{{{ m.content }}}}\n{{% endfor %}}"
    tokenizer = byte_tokenizer(chat_template=ask + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[INST]", "<|im_start|>"]})
    assert ChatTemplate(tokenizer)._ends() == ()


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CLOSED = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "marks", "what"),
    [
        (PLAIN, (), "The chat template writes no end mark that is known."),
        (PLAIN, ("<eos>",), "The chat template does not write <eos> of eot_tokens."),
        (CLOSED, ("<|eot_id|>", "<|end|>"), "The chat template does not write <|eot_id|>, <|end|> of eot_tokens."),
    ],
)
def test_end_marks_that_the_template_does_not_write_are_refused(
    template: str, marks: tuple[str, ...], what: str
) -> None:
    tokenizer = byte_tokenizer(chat_template=template)
    with pytest.raises(UserError) as refused:
        ChatTemplate(tokenizer, learned=LearnedTurns(roles=BOTH, marks=marks))
    assert str(refused.value) == (
        f"{what}\n  the tokenizer's end token is <eos>\n  hint: name the tokens that end a turn there: "
        "eot_tokens: [...]; train_on_eos: none learns none   [no-end-mark]"
    )
    ChatTemplate(tokenizer, learned=LearnedTurns(roles=BOTH, marks=marks, eos="none", eot="none"))


def test_the_end_token_is_among_eot_tokens_where_the_template_writes_it_by_its_name() -> None:
    tokenizer = byte_tokenizer(chat_template=CLOSED)
    chosen = LearnedTurns(roles=ANSWERS, marks=("<eos>",), eot="all")
    assert learned(*ChatTemplate(tokenizer, learned=chosen).render(TALK[1:3])) == ["<eos>", "yes", "<eos>"]


def test_marks_that_say_two_things_or_are_no_tokens_are_refused() -> None:
    with pytest.raises(UserError) as refused:
        spans(TALK, roles=BOTH, marks=(END, "assistant"))
    assert refused.value.code == "mark-of-several-tokens"
    with pytest.raises(UserError) as refused:
        spans(TALK, roles=BOTH, marks=(END, "<|im_start|>"), eos="none")
    assert refused.value.code == "marks-disagree"


GEMMAS_CALL, GEMMAS_END = "<|tool_call>call:add{a:2,b:3}<tool_call|><|tool_response>", "<turn|>"


def gemma_learns(talk: list[dict[str, Any]], eos: EndMarks = "none") -> list[str]:
    """What is learned of the assistant's turns under the template that is named gemma4."""
    tokenizer = byte_tokenizer(chat_template=named_template("gemma4"))
    tokenizer.add_special_tokens({"eos_token": GEMMAS_END})
    return learned(*ChatTemplate(tokenizer, learned=LearnedTurns(roles=ANSWERS, eos=eos, eot=eos)).render(talk, TOOLS))


def test_what_a_call_gave_is_not_learned_where_the_template_shows_it_within_the_turn_that_called() -> None:
    talk = TALKS["calls"]
    assert gemma_learns(talk) == [GEMMAS_CALL, "5"]
    assert gemma_learns([*talk[:2], talk[2] | {"train": False}, talk[3]]) == [GEMMAS_CALL, "5"]
    calling = talk[1] | {"reasoning_content": "a sum"}  # which is shown until the user speaks again
    assert gemma_learns([talk[0], calling, *talk[2:]]) == [f"<|channel>thought\na sum\n<channel|>{GEMMAS_CALL}", "5"]
    again = [*TALK[1:2], talk[1] | {"reasoning_content": "a sum"}, *talk[2:]]
    assert gemma_learns([talk[0], calling, *talk[2:], *again])[:2] == [GEMMAS_CALL, "5"]


def test_what_is_said_beside_a_call_and_shown_behind_its_result_is_learned_by_itself() -> None:
    talk = TALKS["calls"]
    talk = [talk[0], talk[1] | {"content": "I add."}, *talk[2:]]
    assert gemma_learns(talk) == [GEMMAS_CALL, "I add.", "5"]
    assert gemma_learns(talk, eos="turn") == [GEMMAS_CALL, "I add.", GEMMAS_END, "5", GEMMAS_END]


def test_results_that_are_not_told_apart_from_their_call_are_refused() -> None:
    """Where the first line changes with each turn, no shorter conversation tells what a turn says."""
    template = (
        "{{ messages | length }}{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}"
        "{% endfor %}{% if m.tool_calls %}={{ messages[loop.index].content }}]{% endif %}"
        "{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(UserError) as refused:
        choice = LearnedTurns(roles=ANSWERS, eos="none", eot="none")
        ChatTemplate(byte_tokenizer(chat_template=template), learned=choice).render(TALKS["calls"])
    assert refused.value.code == "turns-not-apart" and "turn 2 of" in refused.value.what


ADDS = '[CALLS]{"name": "add", "arguments": {"a": 2, "b": 3}}'
ALTERNATING = (
    "{%- set told = namespace(turns=0) %}{%- for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{%- if (m.role == 'user') != (told.turns % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set told.turns = told.turns + 1 %}{%- endfor %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]{%- elif m.role == 'tool' %}[RESULT]{{ m.content }}"
    "{%- elif m.tool_calls %}[CALLS]{{ m.tool_calls[0].function | tojson }}<eos>"
    "{%- else %}{{ m.content }}<eos>{%- endif %}"
    "{%- endfor %}"
)
"""As Mistral's: answers and questions alternate, calls and their results aside."""


def test_calls_are_learned_under_templates_that_refuse_results_without_them() -> None:
    none = LearnedTurns(roles=ANSWERS, eos="none", eot="none")
    tokenizer = byte_tokenizer(chat_template=ALTERNATING)
    assert learned(*ChatTemplate(tokenizer, learned=none).render(TALKS["calls"])) == [ADDS, "5"]
    call, answer = learned(*ChatTemplate(tokenizer_of("gptoss"), learned=none).render(TALKS["calls"], TOOLS))
    assert call.startswith(" to=functions.add<|channel|>") and '{"a": 2, "b": 3}' in call and answer == "5"
