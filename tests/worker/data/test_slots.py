"""LLaMA-Factory's named templates: each piece of text and what is learned of it are what LLaMA-Factory 0.9.6 makes.

`llama_factory.json` has what its own code makes of the conversations below, under each template: a piece that is
tokenized by itself, with "+" before it where it is learned, "-" where it is not, and "!" where the end token is learned
in place of its first one.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from planner.errors import UserError
from planner.importers.llama_factory_records import Conversation, Pair, read, read_pair
from planner.importers.llama_factory_templates import PREFIX, SlotTemplate, slot_template
from tests.support.texts import byte_tokenizer
from worker.data.slots import Slots

FACTS = json.loads((Path(__file__).parent / "llama_factory.json").read_text("utf-8"))
PAIRS = json.loads((Path(__file__).parent / "llama_factory_pairs.json").read_text("utf-8"))
"""Template -> row of ROWS_OF_PAIRS -> the texts that LLaMA-Factory's own code makes of prompt, chosen and rejected
answer."""
TOOLS = [
    {
        "name": "add",
        "description": "Add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "first"},
                "b": {"type": "string", "enum": ["x", "y"]},
                "c": {"type": "array", "items": {"type": "number"}},
            },
            "required": ["a"],
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CALL = '{"name": "add", "arguments": {"a": 2, "b": "é", "c": [1.0], "d": null, "e": {"k": true}}}'
ROWS: dict[str, tuple[list[tuple[str, str]], dict[str, Any]]] = {
    "turns": (
        [("user", "Hi {{idx}}"), ("function_call", CALL), ("tool", "4"), ("assistant", "\nfour")],
        {"system": "Be\n\nbrief."},
    ),
    "plain": ([("user", "a"), ("assistant", "b")], {}),
    "thoughts": (
        [("user", "a"), ("assistant", "%shm%sb"), ("user", "c"), ("function_call", f"%shm%s{CALL}")],
        {},
    ),
    "tools": (
        [("user", "a"), ("function_call", f'[{CALL}, {{"name": "now", "arguments": {{}}}}]')],
        {"tools": json.dumps(TOOLS)},
    ),
    "one call with tools": ([("user", "a"), ("function_call", CALL)], {"tools": json.dumps(TOOLS)}),
}


ROWS_OF_PAIRS: dict[str, tuple[list[tuple[str, str]], tuple[str, str], tuple[str, str], str]] = {
    "pair": (
        [("user", "a"), ("assistant", "%shm%sx"), ("user", "c")],
        ("assistant", "\nb"),
        ("assistant", "plain"),
        "S",
    ),
    "thoughts": ([("user", "a")], ("assistant", "%smm%sb"), ("assistant", "c"), ""),
    "calls": (
        [("user", "a"), ("function_call", CALL), ("tool", "4")],
        ("assistant", "four"),
        ("function_call", CALL),
        "",
    ),
}
"""Messages of the prompt, chosen answer, rejected answer and system text; %s stands for the marks around thoughts."""


def tokenizer_of(template: SlotTemplate) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.add_tokens([*template.tokens])
    return tokenizer


def template_of(name: str) -> SlotTemplate:
    found = slot_template(PREFIX + name)
    assert found is not None
    return found


def conversation(row: str, template: SlotTemplate) -> Conversation:
    turns, more = ROWS[row]
    said = [
        {"role": role, "content": text.replace("%s", template.thought[0], 1).replace("%s", template.thought[1], 1)}
        for role, text in turns
    ]
    found = read("messages", {"messages": said, **more}, "sharegpt")
    assert isinstance(found, Conversation)
    return found


def pair_of(row: str, template: SlotTemplate) -> Pair:
    def said(turn: tuple[str, str]) -> dict[str, str]:
        text = turn[1].replace("%s", template.thought[0], 1).replace("%s", template.thought[1], 1)
        return {"role": turn[0], "content": text}

    turns, chosen, rejected, system = ROWS_OF_PAIRS[row]
    record = {"messages": [*map(said, turns)], "chosen": said(chosen), "rejected": said(rejected), "system": system}
    found = read_pair("preference", record, "sharegpt")
    assert isinstance(found, Pair)
    return found


def written(slots: Slots, said: Conversation, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    names = {tokenizer.bos_token_id: "{{bos}}", tokenizer.eos_token_id: "{{eos}}"}

    def text(piece: str | int) -> str:
        if isinstance(piece, str):
            return piece
        return names.get(piece) or f"{{{{token:{tokenizer.convert_ids_to_tokens(piece)}}}}}"

    return [f"{'+' if learned else '-'}{text(piece)}" for piece, learned in slots.pieces(said)]


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in FACTS.items() for row in rows], ids="-".join)
def test_each_piece_and_what_is_learned_of_it_is_llama_factorys(name: str, row: str) -> None:
    template = template_of(name)
    tokenizer, values = tokenizer_of(template), {"enable_thinking": row != "thoughts off"}
    slots = Slots(template, name, tokenizer, everything=False, values=values)
    said = conversation(row.removesuffix(" off"), template)
    today = datetime.now().strftime("%d %b %Y")
    expected = [("-" + piece[1:] if piece[0] == "!" else piece).replace("TODAY", today) for piece in FACTS[name][row]]
    assert written(slots, said, tokenizer) == expected
    assert any(piece[0] == "!" for piece in FACTS[name][row]) == (template.ends_once and row[:5] in ("turns", "thoug"))


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in PAIRS.items() for row in rows], ids="-".join)
def test_prompt_and_answers_of_preferences_are_llama_factorys(name: str, row: str) -> None:
    template = template_of(name)
    tokenizer, pair = tokenizer_of(template), pair_of(row.removesuffix(" off"), template)
    slots = Slots(template, name, tokenizer, everything=False, values={"enable_thinking": not row.endswith(" off")})

    def text(pieces: tuple[tuple[str | int, bool], ...]) -> str:
        return "".join(piece if isinstance(piece, str) else str(tokenizer.decode(piece)) for piece, _ in pieces)

    assert pair.chosen is not None and pair.rejected is not None
    (prompt, chosen), (_, rejected) = (slots.answer(pair.conversation, each) for each in (pair.chosen, pair.rejected))
    assert [text(prompt), text(chosen), text(rejected)] == PAIRS[name][row]
    assert not any(scored for _, scored in prompt) and all(scored for _, scored in (*chosen, *rejected))


@pytest.mark.parametrize("name", FACTS)
def test_the_chat_template_that_a_tokenizer_gets_writes_the_same_text(name: str) -> None:
    template = template_of(name)
    tokenizer = tokenizer_of(template)
    tokenizer.chat_template = template.jinja("<s>", "</s>")
    turns = [{"role": role, "content": f"{role}'s\n"} for role in ("system", "user", "assistant", "user", "assistant")]
    for messages in (turns, turns[1:3]):
        found = read("messages", {"messages": messages}, "sharegpt")
        assert isinstance(found, Conversation)
        slots = Slots(template, name, tokenizer, everything=False, values={})
        pieces = [piece for piece, _ in slots.pieces(found) if piece != template.empty_thought or not template.reasons]
        text = "".join(piece if isinstance(piece, str) else str(tokenizer.decode(piece)) for piece in pieces)
        if tokenizer.chat_template is None:
            assert any("{{token:" in text for text in (template.prefix, template.user, template.assistant))
        else:
            shown = tokenizer.apply_chat_template(messages, tokenize=False)
            assert shown + ("</s>" if template.ends_once else "") == text


def test_a_tokenizer_without_the_end_mark_of_a_template_is_refused_with_what_llama_factory_adds() -> None:
    with pytest.raises(UserError) as refused:
        Slots(template_of("llama3"), "llama3", byte_tokenizer(), everything=False, values={})
    assert (refused.value.code, refused.value.numbers) == ("token-not-there", ("<|eot_id|> not among its 260",))
    assert "add_special_tokens: <|eot_id|>" in str(refused.value.hint)


def test_where_llama_factory_cannot_learn_prompts_too_that_is_refused() -> None:
    template = template_of("glm4")
    with pytest.raises(UserError) as refused:
        Slots(template, "glm4", tokenizer_of(template), everything=True, values={})
    assert refused.value.code == "template-prompts"
    slots = Slots(template_of("qwen"), "qwen", byte_tokenizer(), everything=True, values={})
    assert all(learned for _, learned in slots.pieces(conversation("plain", template)))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tools": "no JSON"}, "LLaMA-Factory cannot write these tools (ValueError): no JSON"),
        ({"tools": '[{"name": "add"}]'}, "LLaMA-Factory cannot write these tools (KeyError): "),
        ({"calls": "add 2"}, "LLaMA-Factory cannot write these calls (ValueError): add 2"),
        ({"calls": '{"name": "add"}'}, "LLaMA-Factory cannot write these calls (KeyError): "),
    ],
)
def test_what_llama_factory_fails_at_is_a_broken_record(row: dict[str, str], words: str) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "function_call", "content": row.get("calls", CALL)}]
    found = read("messages", {"messages": turns, "tools": row.get("tools", "")}, "sharegpt")
    assert isinstance(found, Conversation)
    slots = Slots(template_of("yi"), "yi", byte_tokenizer(), everything=False, values={})
    with pytest.raises(ValueError) as refused:
        slots.pieces(found)
    assert str(refused.value).startswith(words)
